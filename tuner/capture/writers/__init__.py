"""Tasks written as templates: C++, CUDA C++ and Triton."""
