import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile


class CudaCode:
    # CUDA C++ beside Triton's kernels: compiled by nvcc as it is loaded, at the latest for the first
    # call, once for each content, into the folder that Triton caches in. Its functions are called
    # by name, with tensors, whole numbers and None; they get the current stream last, and return a message or nothing.

    def __init__(self, text, flags):
        self.text, self.flags, self.nvcc = text, flags, self.compiler()
        self.key = hashlib.sha256("\0".join([text, *flags]).encode()).hexdigest()[:32]
        self.library = None
        self.functions = {}  # by name, with what each takes

    def load(self):
        told = subprocess.run([self.nvcc, "--version"], capture_output=True, text=True, check=True)
        host = os.environ.get("CXX")
        command = [self.nvcc, *self.flags, *(["-ccbin", host] if host else [])]
        content = "\0".join([self.text, *command, told.stdout])
        home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
        folder = os.environ.get("TRITON_CACHE_DIR") or os.path.join(home, ".triton", "cache")
        os.makedirs(folder, exist_ok=True)
        name = f"cuda-{hashlib.sha256(content.encode()).hexdigest()[:32]}"
        self.path = os.path.join(folder, f"{name}.so")
        with open(os.path.join(folder, f"{name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # others that want the same wait, and find it
            if not os.path.exists(self.path):
                self.compile(command, folder)
        with open(self.path + ".log") as log:
            self.log = log.read()
        self.library = ctypes.CDLL(self.path)
        return self

    @staticmethod
    def compiler():
        homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
        places = [shutil.which("nvcc", path=os.path.join(home, "bin")) for home in homes]
        places += [shutil.which("nvcc"), shutil.which("nvcc", path="/usr/local/cuda/bin")]
        found = next(filter(None, places), None)
        if found is None:
            raise RuntimeError("nvcc not found: set CUDA_HOME to a CUDA toolkit")
        return found

    def compile(self, command, folder):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            with open(os.path.join(scratch, "beside.cu"), "w") as source:
                source.write(self.text)
            more = ["-Xcompiler", "-fPIC", "-Xptxas", "-v", "-shared", "-o", "made.so", "beside.cu"]
            known = subprocess.run([self.nvcc, "--help"], capture_output=True, text=True)
            if "--split-compile" in known.stdout:  # several kernels at a time: the same code
                more.insert(0, "--split-compile=4")
            done = subprocess.run([*command, *more], cwd=scratch, capture_output=True, text=True)
            log = done.stdout + done.stderr
            if done.returncode != 0:
                lines = [line for line in log.splitlines() if "error" in line or "fatal" in line]
                raise RuntimeError(f"{log}\n{(lines or ['nvcc failed and says nothing'])[0]}")
            with open(os.path.join(scratch, "log"), "w") as made:
                made.write(log)
            os.replace(os.path.join(scratch, "log"), self.path + ".log")
            os.replace(os.path.join(scratch, "made.so"), self.path)

    def function(self, name, arguments):
        import triton  # which a machine that only compiles may lack

        self.driver = triton.runtime.driver
        if self.library is None:
            self.load()
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        function.argtypes = [
            *(ctypes.c_int64 if isinstance(value, int) else ctypes.c_void_p for value in arguments),
            ctypes.c_void_p,
        ]
        self.functions[name] = function
        return function

    def __call__(self, name, *arguments):
        function = self.functions.get(name) or self.function(name, arguments)
        given = [
            value if value is None or isinstance(value, int) else value.data_ptr()
            for value in arguments
        ]
        active = self.driver.active  # torch.cuda.current_stream makes an object: 5 us
        message = function(*given, active.get_current_stream(active.get_current_device()))
        if message is not None:
            raise RuntimeError(f"{name}: {message.decode(errors='replace')}")
        if LAUNCH_RECORDING.recorder is not None:
            LAUNCH_RECORDING.recorder.launches.append((function, name, arguments))
