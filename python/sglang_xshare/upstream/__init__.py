"""The only modules that read SGLang's own code, and that differ between its releases."""
