"""The figures and tables of "Addressing Membership Inference Attack in Federated Learning with Model Compression"."""
