"""What the stage knows of SGLang's code, and where its releases differ."""
