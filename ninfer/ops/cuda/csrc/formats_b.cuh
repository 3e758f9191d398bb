// Decoders of the other formats; what a decoder is stands in formats_a.cuh.
#pragma once
#include "formats_a.cuh"
