"""The GPU benchmarks. Each experiment measures one thing and compares the results with a target value, its bar."""
