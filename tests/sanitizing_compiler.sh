#!/bin/sh
# `c++` and `g++` for `make test-sanitized`: what they compile ends its process at the first access
# outside of a tensor, at an overflow of signed integers and at whatever else C++ gives no meaning.
# Vectors are loaded from where their numbers are, and PyTorch's classes lack type information.
unset LD_PRELOAD
exec "$TUNER_TESTS_CXX" "$@" -g1 -fno-omit-frame-pointer \
    -fsanitize=address,undefined -fno-sanitize=alignment,vptr -fno-sanitize-recover=all
