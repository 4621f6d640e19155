"""The only code that reads SGLang's own, and that differs between its releases."""
