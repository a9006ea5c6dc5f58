"""Benchmarks: a package, so that no other one of this name, which a site may have, is found in its place."""
