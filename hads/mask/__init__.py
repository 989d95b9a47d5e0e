"""The contract: `BlockMask`, the patterns that need no model, pictures and files of masks."""
