"""Endpoints: the shapes of OpenAI's, Anthropic's and llama.cpp's requests and answers."""
