// Copies of the buffers of a model, taken at every step.
#pragma once
#include "objects.h"

namespace fastguard {

// Copies buffers to where a skipped step finds them: `packs` is a list of tuples of a `_Pack`, whose `kept` takes all, and a
// dict and a key for each buffer. False, and nothing is copied, where one is not finite, or has to be read by torch.
bool copy_buffers(PyObject* packs);

}  // namespace fastguard
