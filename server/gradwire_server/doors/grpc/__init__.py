"""The gRPC door: the service of ``proto/gradwire_proto/v1/training.proto``."""
