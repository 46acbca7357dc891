"""The PyTorch engine: local training of any `torch.nn.Module`."""

from fedcontext.errors import require

require("torch", extra="torch")
