"""The Dynamo frontend: graphs are captured and rewritten while a model runs; products between them are quantized."""
