"""HTTP: llama-server's and OpenAI's endpoints over one loaded model."""
