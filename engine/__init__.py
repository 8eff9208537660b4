"""Programs, data, training and federated algorithms: what runs without a network."""
