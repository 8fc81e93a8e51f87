"""The torch.fx frontend: the model's code runs on traced values, which record operators."""
