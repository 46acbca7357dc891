"""Any `torch.nn.Module` as the devices' model."""
