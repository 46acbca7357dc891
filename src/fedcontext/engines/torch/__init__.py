"""The PyTorch engine: local training of any `torch.nn.Module`."""
