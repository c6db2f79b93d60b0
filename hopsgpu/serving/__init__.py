"""What programs that load or serve a model need to know of it: signature, formats, settings."""
