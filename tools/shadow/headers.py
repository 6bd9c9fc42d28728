#!/usr/bin/env python3
"""Writes the table of CUDA functions that the shadow GPU serves: crates/shadow/src/functions/*.txt.

usage: tools/shadow/headers.py HEADERS

HEADERS is a folder with one folder per unpacked wheel (`pip download --no-deps nvidia-cublas`, `unzip`); only header files
are needed. WHEELS lists the wheels. Needs gcc: declarations are read from preprocessed headers, and sizes of types come from
a small program that is compiled against the same headers.

A line of the table is `name argument... /words`. Positions count the words of the x86-64 System V calling convention: 0 to 5
are the integer registers, 6 and up are words on the stack. Arguments in floating-point registers have no position.

    hP      writes a handle (a pointer that is not null) through the pointer at position P
    iP      writes a handle of 4 bytes that is not 0
    tP      writes a pointer to an empty text
    zN:P    writes N zero bytes
    cP:Q    writes an empty text into the buffer at P, whose length is at Q
    bP:Q    writes zeros into the buffer at P, whose length in bytes is at Q
    pP      a pointer that is only read, or whose use is not known; nothing is written
    r       the function returns a text
"""
import os, re, subprocess, sys, tempfile

# Which wheels: the oldest and the newest CUDA that PyTorch 2.4 to 2.15 is built for, per family. The first of a line is
# the source of sizes; the union of all names goes into the table.
RUNTIME = ["nvidia_cuda_runtime-13", "nvidia_cuda_runtime_cu12-12.8", "nvidia_cuda_runtime_cu12-12.1", "nvidia_cuda_runtime_cu11"]
WHEELS = {
    # family: (wheels, headers, pattern of names, defines)
    "cudart": (RUNTIME, ["cuda_runtime_api.h", "cuda_profiler_api.h", "crt/host_runtime.h"], r"(__)?cuda[A-Z]\w*", ["", "__CUDA_API_VERSION_INTERNAL", "CUDA_API_PER_THREAD_DEFAULT_STREAM"]),
    "cuda": (RUNTIME, ["cuda.h", "cudaProfiler.h"], r"cu[A-Z]\w*", ["", "__CUDA_API_VERSION_INTERNAL", "CUDA_API_PER_THREAD_DEFAULT_STREAM"]),
    "cublas": (["nvidia_cublas-13", "nvidia_cublas_cu12", "nvidia_cublas_cu11"], ["cublas_v2.h", "cublasXt.h"], r"cublas(?!Lt)[A-Z]\w*", ["", "__cplusplus=201703L"]),
    "cublasLt": (["nvidia_cublas-13", "nvidia_cublas_cu12", "nvidia_cublas_cu11"], ["cublasLt.h"], r"cublasLt\w+", [""]),
    "cudnn": (["nvidia_cudnn_cu13", "nvidia_cudnn_cu12"], ["cudnn.h", "cudnn_backend.h"], r"cudnn[A-Z]\w*", [""]),
    "nccl": (["nvidia_nccl_cu13", "nvidia_nccl_cu12"], ["nccl.h"], r"p?nccl[A-Z]\w*", [""]),
    "cusparse": (["nvidia_cusparse-12", "nvidia_cusparse_cu12", "nvidia_cusparse_cu11"], ["cusparse.h"], r"cusparse(?!Lt)[A-Z]\w*", [""]),
    "cusparseLt": (["nvidia_cusparselt"], ["cusparseLt.h"], r"cusparseLt\w+", [""]),
    "cusolver": (["nvidia_cusolver-12", "nvidia_cusolver_cu12", "nvidia_cusolver_cu11"], ["cusolverDn.h", "cusolverSp.h", "cusolverSp_LOWLEVEL_PREVIEW.h", "cusolverRf.h", "cusolverMg.h"], r"cusolver[A-Z]\w*", [""]),
    "cufft": (["nvidia_cufft-12", "nvidia_cufft_cu11"], ["cufft.h", "cufftXt.h"], r"cufft[A-Z]\w*", [""]),
    "curand": (["nvidia_curand"], ["curand.h"], r"curand[A-Z]\w*", [""]),
    "nvrtc": (["nvidia_cuda_nvrtc-13", "nvidia_cuda_nvrtc_cu12"], ["nvrtc.h"], r"nvrtc[A-Z]\w*", [""]),
    "cupti": (["nvidia_cuda_cupti-13", "nvidia_cuda_cupti_cu12", "nvidia_cuda_cupti_cu11"], ["cupti.h", "cupti_profiler_target.h", "cupti_profiler_host.h", "cupti_pcsampling.h", "cupti_pmsampling.h", "cupti_range_profiler.h", "cupti_checkpoint.h"], r"cupti[A-Z]\w*", [""]),
    "nvml": (["nvidia_nvml_dev"], ["nvml.h"], r"nvml[A-Z]\w*", ["", "NVML_NO_UNVERSIONED_FUNC_DEFS"]),
    "nvJitLink": (["nvidia_nvjitlink"], ["nvJitLink.h"], r"_*nvJitLink[A-Z]\w*", [""]),
    "nvToolsExt": (["nvidia_nvtx_cu11", "nvidia_nvtx_cu12"], ["nvToolsExt.h", "nvToolsExtCuda.h", "nvToolsExtCudaRt.h"], r"nvtx[A-Z]\w*", [""]),
    "nvshmem": (["nvidia_nvshmem"], ["nvshmem_host.h", "nvshmemx.h"], r"nvshmemx?_(hostlib|init|finalize|malloc|calloc|align|free|my_pe|n_pes|info|ptr|team|barrier|sync|quiet|fence|cu[a-z]*|buffer|set|get|query|vendor)(_(?!bfloat|half|float|double|char|[su]?int|[su]?long|[su]?short|uchar|ptrdiff|size_)\w+)?", [""]),
    "cufile": (["nvidia_cufile"], ["cufile.h"], r"cuFile[A-Z]\w*", [""]),
}
# Functions without a declaration in a public header: the host stubs that nvcc writes call them, or one library calls the other.
# Signatures: host_runtime.h of CUDA 11 to 13, and the imports of PyTorch's own libraries.
UNDECLARED = {
    "cudart": ["__cudaRegisterFatBinary p0 /1", "__cudaRegisterFatBinaryEnd p0 /1", "__cudaUnregisterFatBinary p0 /1", "__cudaInitModule p0 /1",
               "__cudaRegisterFunction p0 p1 p2 p3 p5 p6 p7 p8 p9 /10", "__cudaRegisterVar p0 p1 p2 p3 /8", "__cudaRegisterManagedVar p0 p1 p2 p3 /8",
               "__cudaRegisterSurface p0 p1 p2 p3 /6", "__cudaRegisterTexture p0 p1 p2 p3 /7",
               "__cudaPushCallConfiguration /6", "__cudaPopCallConfiguration z12:0 z12:1 z8:2 z8:3 /4",
               "__cudaLaunchKernel p0 p5 /8", "__cudaLaunchKernel_ptsz p0 p5 /8", "__cudaGetKernel h0 p1 /2",
               "cudaProfilerStart /0", "cudaProfilerStop /0"],
    "cufile": ["cuFileHandleRegister h0 p1 /2"],
}
BY_VALUE = {"cuComplex": [], "cuFloatComplex": [], "cuDoubleComplex": [], "float": [], "double": []}   # in floating-point registers
NOT_WRITTEN = re.compile(r"^(n|config|commIds?|attributes|nodes|inembed|onembed|dims?A?|strides?A?|kernelParams|extra|args|params|optionValues|options|values|hostPtrs?|.*[aA]rray|.*Params|devPtrs?|ptrs|data|descs?|sizes|srcs?|dsts?|idata|odata|input|output)$")
DATA = re.compile(r"^(float|double|void|char|cuComplex|cuDoubleComplex|__half|__nv_bfloat16|half|cufft\w+|.*_t\b)$")
OUT_FUNCTION = re.compile(r"Get|get|Query|query|[sS]ize|Count|count|Version|version|Create|create|Is[A-Z]|Can[A-Z]|Find|Heuristic|Info|Init|Alloc|Open|Plan|plan|Register|_n_pes|Export|Import|Elapsed|Occupancy|Range|Estimate")
OUT_NAME = re.compile(r"[lL]work|info|[vV]ersion|[cC]ount|num|[sS]ize|[bB]ytes|result|position|nnz|isNull|Ret$|_out$|Out$|^p[A-Z]|priority|status|flags?$|device|major|minor")


def preprocess(headers, include, define):
    text = "".join(f'#if __has_include("{h}")\n#include "{h}"\n#endif\n' for h in headers)
    prefix = "#define __CUDA_INCLUDE_COMPILER_INTERNAL_HEADERS__\n" if any("crt/" in h for h in headers) else ""
    command = ["gcc", "-E", "-P", "-x", "c", "-w", "-", *[f"-I{i}" for i in include], *([f"-D{define}"] if define else [])]
    result = subprocess.run(command, input=prefix + text, capture_output=True, text=True)
    for missing in re.findall(r"fatal error: (.*)", result.stderr): print(f"  {headers[0]} in {include[0]}: {missing}", file=sys.stderr)
    return result.stdout


def declarations(text, pattern):
    """Top-level declarations of functions: (return type, name, arguments)."""
    text = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", " ", text)
    text = re.sub(r'\bextern\s*(?:"C"\s*\{?)?|__inline__|\binline\b|\bstatic\b|__asm__\s*\([^)]*\)', " ", text)
    depth, start, chunks = 0, 0, []
    for m in re.finditer(r"[{};]", text):
        c = m.group()
        if c == "{":
            if depth == 0: start_body = m.start()
            depth += 1
        elif c == "}":
            depth = max(0, depth - 1)
            if depth == 0 and re.search(r"\)\s*$", text[start:start_body]): start = m.end()   # a definition: inline code
        elif depth == 0:
            chunks.append(text[start:m.start()]); start = m.end()
    name = re.compile(r"^(.*?)\b(" + pattern + r")\s*\((.*)\)\s*$", re.S)
    for chunk in chunks:
        chunk = " ".join(chunk.split())
        if chunk.startswith("typedef") or "{" in chunk: continue
        m = name.match(chunk)
        if m and "(" not in m.group(1) and m.group(1).strip(): yield m.group(1).strip(), m.group(2), m.groups()[-1]


def split_arguments(text):
    depth, part, parts = 0, "", []
    for c in text:
        if c == "," and depth == 0: parts.append(part); part = ""; continue
        depth += {"(": 1, ")": -1}.get(c, 0); part += c
    parts = [p.strip() for p in parts + [part]]
    return [p for p in parts if p and p != "void" and p != "..."]


def parse_argument(text):
    """(type without the outermost pointer or None, whether the target is constant, name, is by value, the full type)"""
    if "(" in text: return None, True, "", False, "function"         # pointer to a function
    array = text.count("["); text = re.sub(r"\[[^\]]*\]", "", text).strip()
    text = re.sub(r"\b(__restrict__|restrict|volatile|struct|enum)\b", lambda m: m.group() if m.group() in ("struct", "enum") else "", text)
    stars = text.count("*") + array
    last = text.rfind("*")
    tail = text[last + 1:].split() if last >= 0 else text.split()
    words = re.findall(r"\w+", text.replace("*", " "))
    builtin = {"int", "unsigned", "long", "short", "char", "float", "double", "size_t", "const", "void", "signed"}
    name = tail[-1] if tail and tail[-1] != "const" and (last >= 0 or len(words) > 1 and tail[-1] not in builtin) else ""
    base = [w for w in words if w != name or words.count(name) > 1]
    if name and base and base[-1] == name and words.count(name) > 1: base = base[:-1]
    constant = False
    if stars == 1: constant = "const" in base
    elif stars >= 2:                                                  # T const * * : what the outermost pointer points to
        inner = text[:text.rfind("*")] if not array else text
        constant = bool(re.search(r"\*\s*const\s*$", inner.strip())) or (array and bool(re.search(r"\*\s*const\b", text)))
    return " ".join(w for w in base if w != "const"), constant, name, stars, " ".join(base)


def type_facts(types, headers, include):
    """Size and kind (pointer, integer, struct, real) of each type that compiles."""
    facts = {}
    def attempt(names):
        code = "#include <stdio.h>\n#include <stddef.h>\n#include <stdint.h>\n#include <stdbool.h>\n" + "".join(f'#if __has_include("{h}")\n#include "{h}"\n#endif\n' for h in headers) + "int main(){" + "".join(
            f'{{ printf("%zu %d %s\\n", sizeof({t}), __builtin_classify_type(*({t}*)0), "{t}"); }}\n' for t in names) + "}"
        with tempfile.TemporaryDirectory() as d:
            r = subprocess.run(["gcc", "-x", "c", "-w", "-", "-o", d + "/a", *[f"-I{i}" for i in include]], input=code, capture_output=True, text=True)
            if r.returncode: return set(re.findall(r":(\d+):\d+: error", r.stderr)), code
            for line in subprocess.run([d + "/a"], capture_output=True, text=True).stdout.splitlines():
                size, kind, t = line.split(" ", 2); facts[t] = (int(size), {5: "pointer", 8: "real", 9: "real", 12: "struct", 13: "struct"}.get(int(kind), "integer"))
            return None, code
    names = sorted(types)
    for _ in range(6):
        bad, code = attempt(names)
        if bad is None: break
        lines = code.splitlines(); broken = {re.search(r'"([^"]*)"\); \}', lines[int(b) - 1]).group(1) for b in bad if int(b) <= len(lines) and re.search(r'"([^"]*)"\); \}', lines[int(b) - 1])}
        if not broken: break
        names = [n for n in names if n not in broken]
    return facts


def line(returns, name, arguments, facts):
    words, registers, stack, vector, positions = [], 0, 6, 0, []
    parsed = [parse_argument(a) for a in arguments]
    for base, _, _, stars, full in parsed:                            # the calling convention
        size, kind = (8, "pointer") if full == "function" or stars else facts.get(base, (8, "integer"))
        if not stars and full != "function" and (kind == "real" or base in BY_VALUE):
            n = 2 if base == "cuDoubleComplex" else 1
            if vector + n <= 8: vector += n; positions.append(None)
            else: positions.append(stack); stack += n
            continue
        n = (size + 7) // 8
        if n <= 2 and registers + n <= 6: positions.append(registers); registers += n
        else: positions.append(stack); stack += n
    output = bool(OUT_FUNCTION.search(name))
    for i, (base, constant, argument, stars, full) in enumerate(parsed):
        p = positions[i]
        if p is None or not (stars or full == "function"): continue
        outer = None if constant or full == "function" else base if stars == 1 else "pointer"
        following = parsed[i + 1] if i + 1 < len(parsed) else None
        before = parsed[i - 1] if i else None
        if outer is None or NOT_WRITTEN.match(argument or "") and not (outer == "size_t" and argument == "sizes"): words.append(f"p{p}"); continue
        if outer == "pointer":
            if "char" in full and "const" in full and stars == 2: words.append(f"t{p}")
            elif base == "void" or stars > 2: words.append(f"z8:{p}" if output or re.search("Map|Reserve|Address|Ptr|ptr", name + argument) else f"p{p}")
            else: words.append(f"h{p}" if output else f"p{p}")
            continue
        size, kind = facts.get(outer, (0, "unknown"))
        if outer in ("void", "char", "unsigned char"):
            sized = next((j for j in (i + 1, i - 1) if 0 <= j < len(parsed) and not parsed[j][3] and re.search(r"[sS]ize|[lL]en|[bB]ytes", parsed[j][2] or "") and positions[j] is not None), None)
            if output and "Get" in name + "" and sized is not None and not re.match(r"cu(da)?Mem|.*Set", name): words.append(f"{'b' if outer == 'void' else 'c'}{p}:{positions[sized]}")
            else: words.append(f"p{p}")
        elif outer in ("cudaStream_t", "CUstream"): words.append(f"z8:{p}" if "Get" in name else f"h{p}" if "Create" in name else f"p{p}")
        elif kind == "pointer": words.append(f"h{p}" if not re.search(r"Destroy|Free(?!Async)|[sS]et(?!Up)", name) else f"p{p}")
        elif outer == "size_t" or kind == "integer" and size == 8 and outer in ("uint64_t", "CUdeviceptr", "unsigned long long", "unsigned long long int", "int64_t", "long long int", "long long"):
            words.append(f"z8:{p}" if output or OUT_NAME.search(argument or "") else f"p{p}")
        elif outer == "cufftHandle": words.append(f"i{p}")
        elif kind == "integer" and size: words.append(f"z{size}:{p}" if output or OUT_NAME.search(argument or "") else f"p{p}")
        elif kind == "real" or outer in BY_VALUE: words.append(f"z{size}:{p}" if argument == "result" or name.startswith("cudaEvent") or "Get" in name and size else f"p{p}")
        elif kind == "struct" and size: words.append(f"z{size}:{p}" if output and not re.search(r"Create(?!.*Desc)|Add|Set", name) else f"p{p}")
        else: words.append(f"p{p}")
    if "*" in returns and "char" in returns: words.append("r")
    count = max([registers] + ([stack] if stack > 6 else []))
    return " ".join([name, *words, f"/{count}"])


STRUCTS = {"cudaDeviceProp": "cuda_runtime_api.h", "cudaFuncAttributes": "cuda_runtime_api.h", "cudaPointerAttributes": "cuda_runtime_api.h"}


def layouts(includes, target):
    """Offsets and sizes of the fields of structures that the library fills, for each major version of CUDA."""
    lines = ["# made by tools/shadow/headers.py: structure, major version of CUDA, size; then field, offset, size"]
    for major, path in includes.items():
        for struct, header in STRUCTS.items():
            text = preprocess([header], path, "")
            body = re.search(r"struct\s*(?:__attribute__\(\([^)]*\)\)\)\s*)?" + struct + r"\s*\{(.*?)\}\s*;", text, re.S).group(1)
            fields = [re.search(r"(\w+)\s*(?:\[[^\]]*\])*\s*$", d).group(1) for d in body.split(";") if d.strip()]
            code = f'#include <stdio.h>\n#include <stddef.h>\n#include "{header}"\nint main(){{struct {struct} s; printf("{struct} {major} %zu\\n", sizeof s);' + "".join(f'printf("  {f} %zu %zu\\n", offsetof(struct {struct}, {f}), sizeof s.{f});' for f in fields) + "}"
            with tempfile.TemporaryDirectory() as d:
                subprocess.run(["gcc", "-x", "c", "-w", "-", "-o", d + "/a", *[f"-I{i}" for i in path]], input=code, text=True, check=True)
                lines += subprocess.run([d + "/a"], capture_output=True, text=True, check=True).stdout.splitlines()
    with open(os.path.join(target, "layouts.txt"), "w") as f: f.write("\n".join(lines) + "\n")


def folders(root, prefix):
    found = [d for d in sorted(os.listdir(root)) if d.startswith(prefix)]
    return [p for d in found for p, _, files in os.walk(os.path.join(root, d)) if os.path.basename(p) == "include"]


def main():
    with tempfile.TemporaryDirectory() as stubs:
        for name in ("nv/target", "string", "vector", "utility", "memory", "type_traits", "cmath", "cstring", "cstdint", "limits", "climits", "cstdlib", "cassert"):                # C++ headers that C declarations do not need
            os.makedirs(os.path.dirname(f"{stubs}/{name}"), exist_ok=True); open(f"{stubs}/{name}", "w").close()
        write_tables(sys.argv[1], stubs)


def write_tables(root, stubs):
    target = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../crates/shadow/src/functions")
    runtimes = {major: next((f for p in RUNTIME if major in p for f in folders(root, p)), None) for major in ("-13", "cu12", "cu11")}
    layouts({11: [runtimes["cu11"], runtimes["-13"], stubs], 12: [runtimes["cu12"], runtimes["-13"], stubs], 13: [runtimes["-13"], stubs]}, target)
    for family, (wheels, headers, pattern, defines) in WHEELS.items():
        table, seen = {}, []
        for wheel in wheels:
            for include in folders(root, wheel):
                runtime = runtimes["cu11" if "cu11" in wheel else "cu12" if "cu12" in wheel else "-13"] or runtimes["cu12"]
                # crt/ is not in the wheels of CUDA 11 and 12, cusolver's headers include those of cublas and cusparse.
                others = [f for p in ("nvidia_cublas-13", "nvidia_cublas_cu11", "nvidia_cusparse-12") for f in folders(root, p)]
                path = [p for p in (include, runtime, runtimes["-13"], *others, stubs) if p]
                found = [d for define in defines for d in declarations(preprocess(headers, path, define), pattern)]
                if not found: continue
                arguments = [parse_argument(a) for _, _, text in found for a in split_arguments(text)]
                facts = type_facts({b for b, _, _, stars, full in arguments if b and full != "function" and b != "void"}, headers, path)
                seen.append(os.path.basename(os.path.relpath(include, root).split("/")[0]))
                for returns, name, text in found:
                    if name not in table: table[name] = line(returns, name, split_arguments(text), facts)
        for l in UNDECLARED.get(family, []): table[l.split()[0]] = l
        print(f"{family}: {len(table)} functions from {', '.join(seen)}")
        with open(os.path.join(target, family + ".txt"), "w") as f:
            f.write(f"# {family}: made by tools/shadow/headers.py from the headers of {', '.join(seen)}\n")
            f.writelines(table[n] + "\n" for n in sorted(table))


if __name__ == "__main__":
    main()
