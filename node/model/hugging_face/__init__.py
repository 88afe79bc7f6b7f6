"""Models in the form of Hugging Face: config.json and folders of weights."""
