# Launches of Triton's kernels without what Triton asks anew at each. The text has `torch`, `triton`.

import threading

LAUNCHES_AT_ONCE = True  # what compiles ahead, and has to see each launch, turns it off
# Triton 3.6 loads the launcher of each kernel as an extension module, all of one name. A module
# that is loaded again (another kernel, the same kinds of arguments) is the one that was loaded last
# under that name, written over: a second thread that loads then may hand its launcher to the first.
# So one thread at a time launches what is launched for the first time, and compiles it, for all
# files like this one in a process; Triton's kernels of others are not held up.
FIRST_LAUNCH = vars(triton).setdefault("_first_launch_of_a_form", threading.RLock())


class LaunchRecording(threading.local):
    # Who watches the launches of this thread, if anybody does.

    recorder = None


LAUNCH_RECORDING = LaunchRecording()


def ceil_div(a, b):
    # As triton.cdiv, which is for kernels first and takes the host ten times as long.
    return -(-a // b)


class launched:
    # A kernel whose launches after the first of a form go straight to what Triton compiled for
    # it. Of one form are launches with the same numbers, and tensors of the same dtypes whose
    # addresses are multiples of 16 or are not: all that Triton compiles a kernel for.

    options = {}  # what it is compiled with besides

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled = {}
        version = tuple(map(int, triton.__version__.split(".")[:2]))  # older ones launch otherwise
        is_compiled = isinstance(kernel, triton.JITFunction)  # and not interpreted
        self.is_known = is_compiled and version >= (3, 4) and torch.version.hip is None

    def form_of(self, arguments, constants):
        form = [torch.cuda.current_device()]
        for given in arguments:
            if isinstance(given, torch.Tensor):
                form.append(given.dtype if given.data_ptr() % 16 == 0 else (given.dtype,))
            elif given is None or type(given) in (int, float):
                form.append(given)
            else:
                return None
        return (*form, *constants, *constants.values())

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            recorder = LAUNCH_RECORDING.recorder
            if not (self.is_known and LAUNCHES_AT_ONCE):
                if recorder is not None:
                    recorder.why = "Triton launches otherwise"
                return self.kernel[grid](*arguments, **constants, **self.options)
            form = self.form_of(arguments, constants)
            found = self.compiled.get(form)
            if found is None:
                with FIRST_LAUNCH:
                    made = self.kernel[grid](*arguments, **constants, **self.options)
                names = self.kernel.arg_names[len(arguments) :]
                if form is None or any(name not in constants for name in names):
                    if recorder is not None:
                        recorder.why = "a launch has no form"
                    return made
                if len(self.compiled) >= 256:  # as many numbers of rows, say
                    self.compiled.clear()
                found = self.compiled[form] = made, [constants[name] for name in names]
            else:
                found[0][(*grid, 1, 1)[:3]](*arguments, *found[1])
            made, rest = found
            if recorder is not None:
                recorder.launches.append((made, (*grid, 1, 1)[:3], (*arguments, *rest)))
            return made

        return launch


class launched_rounded(launched):
    # One whose products are rounded before something is added to them or taken from them.
    options = {"enable_fp_fusion": False}
