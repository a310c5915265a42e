"""Models in files: Hugging Face folders with safetensors, and GGUF files."""
