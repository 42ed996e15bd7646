"""Process groups: measures gradients over all ranks, so that every rank makes the same decision."""
