"""Machine code of one loop that runs where there is no compiler: what numba makes of it, without what ties it to numba.

A loop's code holds all loops that it calls. It is wrapped in a function of addresses and sizes, as C would call it.
What numba's own library would do for it is done here: memory for arrays within a loop is taken from the system, and of
raising an exception only its sign remains, as loops never do.
"""

from types import FunctionType
from typing import Any, Final

import numba
from llvmlite import binding as llvm
from numba import types

from optim.kernels.code_cache import ENTRY_NAME, ArgumentType, processor, target_machine

# An array's memory begins with how many refer to it, what ends it, and where its values are.
ALLOCATOR_IR: Final = """
declare ptr @malloc(i64)
declare void @free(ptr)

define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %alignment) {
    %wide = zext i32 %alignment to i64
    %around = add i64 %wide, 64
    %all = add i64 %size, %around
    %block = call ptr @malloc(i64 %all)
    %missing = icmp eq ptr %block, null
    br i1 %missing, label %done, label %fill
fill:
    %address = ptrtoint ptr %block to i64
    %beyond = add i64 %address, %around
    %past = urem i64 %beyond, %wide
    %start = sub i64 %beyond, %past
    %values = inttoptr i64 %start to ptr
    store { i64, ptr, ptr, ptr, i64, ptr } { i64 1, ptr null, ptr null, ptr null, i64 0, ptr null }, ptr %block
    %place = getelementptr { i64, ptr, ptr, ptr, i64, ptr }, ptr %block, i32 0, i32 3
    store ptr %values, ptr %place
    br label %done
done:
    ret ptr %block
}

define void @NRT_MemInfo_call_dtor(ptr %block) {
    call void @free(ptr %block)
    ret void
}
"""
SYSTEM_SYMBOLS: Final = ("llvm.", "memset", "memcpy", "memmove", "malloc", "free")


def compile_function(function: FunctionType, kinds: tuple[ArgumentType, ...]) -> bytes:
    """Object code for this process's `processor()`."""
    code: bytes = target_machine().emit_object(build_module(function, kinds))
    return code


def build_module(function: FunctionType, kinds: tuple[ArgumentType, ...], **options: Any) -> llvm.ModuleRef:
    """`options`: more of numba's."""
    numba.config.CPU_NAME, numba.config.CPU_FEATURES = processor(), ""
    options |= {"error_model": "numpy"}
    wrapper = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(
        _make_entry(function, kinds, options)
    )
    wrapper.compile(tuple(word for kind in kinds for word in _native_types(kind)))
    (signature,) = wrapper.nopython_signatures
    module = llvm.parse_assembly(wrapper.inspect_llvm(signature.args))
    module.get_function(wrapper.overloads[signature.args].fndesc.llvm_func_name).name = ENTRY_NAME
    module.link_in(llvm.parse_assembly(ALLOCATOR_IR))
    module.link_in(llvm.parse_assembly("\n".join(map(_define_stub, _undefined_functions(module)))))
    module.verify()
    return module


def _native_types(kind: ArgumentType) -> list[Any]:
    """An array is where its values begin, and how many there are in each direction."""
    name, dimensions = kind
    number = getattr(types, "boolean" if name == "bool" else name)
    return [types.CPointer(number), *[types.int64] * dimensions] if dimensions else [number]


def _make_entry(function: FunctionType, kinds: tuple[ArgumentType, ...], options: dict[str, Any]) -> FunctionType:
    """Over numbers and addresses, which gives a whole number."""
    names, arguments = list[str](), list[str]()
    for place, (_, dimensions) in enumerate(kinds):
        sizes = [f"size_{place}_{axis}" for axis in range(dimensions)]
        names += [f"word_{place}", *sizes]
        arguments.append(f"carray(word_{place}, ({', '.join(sizes)},))" if dimensions else f"word_{place}")
    call = f"loop({', '.join(arguments)})"
    result = call if function.__annotations__["return"] is None else f"return int({call})"
    scope: dict[str, Any] = {"carray": numba.carray, "loop": _make_dispatcher(function, options, {})}
    exec(f"def entry({', '.join(names)}):\n    {result}\n", scope)
    entry: FunctionType = scope["entry"]
    return entry


def _make_dispatcher(function: FunctionType, options: dict[str, Any], known: dict[FunctionType, Any]) -> Any:
    """Numba's own of a loop, in which the loops that it calls are numba's too."""
    if function not in known:
        scope = dict(function.__globals__)
        for name in function.__code__.co_names:
            called = getattr(scope.get(name), "function", None)
            if isinstance(called, FunctionType):
                scope[name] = _make_dispatcher(called, options, known)
        known[function] = numba.njit(**options)(FunctionType(function.__code__, scope, function.__name__))
    return known[function]


def _undefined_functions(module: llvm.ModuleRef) -> list[llvm.ValueRef]:
    """What is called and neither here nor the system's: only what would raise an exception."""
    return [
        function
        for function in module.functions
        if function.is_declaration and not function.name.startswith(SYSTEM_SYMBOLS)
    ]


def _define_stub(function: llvm.ValueRef) -> str:
    """A function of that name that does nothing and gives a zero."""
    declared = str(function).strip().splitlines()[-1].removeprefix("declare ").partition(" #")[0]
    result = declared.partition("@")[0].replace("noalias", "").split()[-1]
    value = {"void": "", "ptr": " null"}.get(result, " 0")
    return f"define {declared.replace(' local_unnamed_addr', '')} {{ ret {result}{value} }}"
