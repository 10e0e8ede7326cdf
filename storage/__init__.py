"""Artifacts in any fsspec file system: manifests written last, verified transfers, locks. Imports no other package of
the project."""
