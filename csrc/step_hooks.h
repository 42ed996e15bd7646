// The hooks of a guard in C++: a step that is clean, and a forward pass that is not looked at, enter no Python function.
// Each leaves every unusual case to the Python function that it replaces, which is the reference.
#pragma once
#include "objects.h"

namespace fastguard {

// StepPreHook(hooks, before), StepPostHook(hooks, after): hooks for torch.optim.Optimizer. `hooks` is a HooksState; `before`
// and `after` are its methods that do the same.
void add_step_hooks(PyObject* module);

// observe_method(function): a method descriptor that puts a plain loss into the newest slot, and calls `function` for others.
// guard_attribute(function): a descriptor that finds an optimizer's own guard, and asks `function` for that of others.
void add_guard_descriptors(PyObject* module);

// QuietHooks: an OrderedDict of forward hooks that is false while the only one has nothing to do.
void add_quiet_hooks(PyObject* module);

}  // namespace fastguard
