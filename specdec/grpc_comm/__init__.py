"""gRPC plumbing: generated code, channels, servers, error mapping. Knows nothing of inference."""
