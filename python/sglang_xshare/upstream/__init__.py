"""The only modules that read SGLang's own code. They also handle all differences between its releases."""
