"""Which calls the Hopper kernels serve, decided without a device, and what the gate counts of them."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch

pytest.importorskip("triton")

from megafold import triton_support
from megafold.evoflash3d import gradients
from megafold.evoflash3d.launch import Problem, hopper_kernels, hopper_serves
from megafold.testing import _awaited, _early_releases, _loop_spills

BF16 = torch.bfloat16


def problem(dtype=BF16, dim=32, bias=BF16, mask=None, dropout_p=0.0, change=lambda q, k, v: (q, k, v)):
    rows, heads, n = 3, 2, 16
    q, k, v = change(*(torch.randn(1, rows, n, heads, dim).to(dtype).transpose(2, 3) for _ in range(3)))
    bias = None if bias is None else torch.randn(1, heads, n, n).to(bias)
    return Problem(q, k, v, bias, mask, None, dim**-0.5, dropout_p, [0] * 5)


def shifted(tensor):
    """The same numbers at an address that is not a multiple of 16 bytes."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)


SERVED = {
    "bf16": {},
    "bf16 with fp32 bias, rounded once": {"bias": torch.float32},
    "head dim 64": {"dim": 64},
    "a mask that all rows share": {"mask": torch.ones(1, 1, 16, dtype=torch.bool).expand(1, 3, 16)},
}
NOT_SERVED = {
    "fp32": {"dtype": torch.float32, "bias": torch.float32},
    "fp16": {"dtype": torch.float16, "bias": torch.float16},
    "head dim 48": {"dim": 48},
    "fp16 with fp32 bias": {"dtype": torch.float16, "bias": torch.float32},
    "no bias": {"bias": None},
    "head dim 16": {"dim": 16},
    "head dim 128": {"dim": 128},
    "dropout": {"dropout_p": 0.25},
    "a mask of every row": {"mask": torch.ones(1, 3, 16, dtype=torch.bool)},
    "unaligned": {"change": lambda q, k, v: (q, shifted(k.contiguous()), v)},
    "expanded": {"change": lambda q, k, v: (q, k, v[:, :1].expand(v.shape))},
}


@pytest.mark.parametrize("case", SERVED)
def test_served(case):
    assert hopper_serves(problem(**SERVED[case]))


@pytest.mark.parametrize("case", NOT_SERVED)
def test_left_to_the_triton_kernels(case):
    assert not hopper_serves(problem(**NOT_SERVED[case]))


def test_an_incoming_gradient_that_cannot_be_read_is_left_to_the_triton_kernels():
    gradient = torch.zeros(1, 3, 2, 16, 32, dtype=BF16)
    assert hopper_serves(problem(), {"grad_out": gradient})
    assert not hopper_serves(problem(), {"grad_out": shifted(gradient)})


def test_other_architectures_name_no_hopper_kernel():
    for arch in set(triton_support.ARCHITECTURES) - {"sm_90"}:
        table = triton_support.shipped_table("evoflash3d", arch)["configs"]
        entries = [
            c for kernel in table.values() for dims in kernel.values() for d in dims.values() for c in d.values()
        ]
        assert entries and not any(hopper_kernels(problem(), config) for config in entries)


def test_table_entries_load_the_hopper_kernels():
    entry = triton_support.shipped_table("evoflash3d", "sm_90")["configs"]["keys"]["16"]["D32"]["1024"]
    assert (hopper_kernels(problem(), entry) is not None) == triton_support.has_gluon()
    assert hopper_kernels(problem(dropout_p=0.5), entry) is None


@pytest.mark.parametrize(("length", "named"), [(17, True), (512, True), (1024, True), (1025, False)])
def test_whole_rows_as_long_as_shared_memory_has_room_for_dq(length, named, monkeypatch):
    monkeypatch.setattr(triton_support, "architecture", lambda index=None: "sm_90")
    q, bias = torch.empty(1, 1, 1, length, 32, dtype=BF16), torch.empty(1, 1, length, length, dtype=BF16)
    found = Problem(q, q, q, bias, None, None, 1.0, 0.0, [0] * 5).rows_config()
    assert ("gluon" in found) == named
    monkeypatch.setattr(triton_support, "architecture", lambda index=None: "gfx942")
    assert Problem(q, q, q, bias, None, None, 1.0, 0.0, [0] * 5).rows_config() == {}


@pytest.mark.parametrize(("rows", "expected"), [(384, True), (66, True), (40, False), (1, False)])
def test_whole_rows_only_when_there_are_enough_for_the_device(rows, expected, monkeypatch):
    """Of 4 heads on 132 multiprocessors: 264 rows of all heads are two full waves, 160 leave 40 % of two waves idle."""
    monkeypatch.setattr(triton_support, "multiprocessors", lambda device: 132)
    q, bias = torch.empty(1, rows, 4, 64, 32, dtype=BF16), torch.empty(1, 4, 64, 64, dtype=BF16)
    config = triton_support.shipped_table("evoflash3d", "sm_90")["configs"]["rows"]["16"]["D32"]["128"]
    problem = Problem(q, q, q, bias, None, None, 1.0, 0.0, [0] * 5)
    assert gradients.serves_whole_rows(problem, config, q) == (expected and triton_support.has_gluon())
    assert not gradients.serves_whole_rows(problem, {}, q)


@pytest.mark.parametrize(("items", "slots", "lost"), [(132, 132, 0.0), (133, 132, 131 / 264), (1, 4, 0.75)])
def test_share_of_the_device_that_waits_for_the_last_wave(items, slots, lost):
    assert gradients.lost_share(items, slots) == pytest.approx(lost)


CODE = """
        /*0000*/                   STL [R1], R2 ;
.L_x_1:
        /*0010*/                   LDL R2, [R1] ;
.L_x_2:
        /*0020*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0 ;
        /*0030*/              {0}
        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR4], R24, gsb0 ;
        /*0050*/              @P0  BRA `(.L_x_2) ;
        /*0060*/              @P1  BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(("waits", "share"), [(2, 1.0), (1, 0.5)])
def test_products_that_a_wait_follows_at_once(waits, share):
    code = CODE.replace("{0}", "FADD R1, R2, R3 ;")
    assert _awaited(code if waits == 2 else code.replace(", gsb0", "", 1)) == share


@pytest.mark.parametrize(("line", "spills"), [("FADD R1, R2, R3 ;", 0), ("LDL.LU R3, [R1+0x4] ;", 1)])
def test_spills_count_where_they_are_in_the_way(line, spills):
    assert _loop_spills(CODE.replace("{0}", line)) == spills


def instruction(text: str, own: int = 7, waits: int = 0) -> str:
    """As nvdisasm prints it: a scoreboard of its own (7: none), and the scoreboards that it waits for as bits."""
    return f"/*0010*/ {text} ;  /* 0x0 */\n  /* 0x{(waits << 11 | own << 5) << 41:016x} */\n"


LOAD = instruction("LDSM.16.M88.4 R12, [R23]", own=2)
RELEASE = instruction("BAR.SYNC.DEFER_BLOCKING 0x2, 0x80") + instruction("@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR7], RZ")
NEEDED, FENCE = instruction("FADD R1, R12, R2", waits=0b100), instruction("MEMBAR.ALL.CTA")


@pytest.mark.parametrize(
    ("code", "early"),
    [
        (LOAD + RELEASE, 1),
        (LOAD + NEEDED + RELEASE, 0),
        (LOAD + FENCE + RELEASE, 0),
        (LOAD + RELEASE + NEEDED, 1),
        (LOAD + instruction("FADD R1, R2, R3", waits=0b11) + RELEASE, 1),
        (instruction("LDS R8, [R9]") + LOAD + NEEDED + RELEASE, 0),
        (NEEDED + RELEASE, 0),
    ],
    ids=["nothing", "needed", "fence", "needed late", "another's", "one for two", "no load"],
)
def test_stages_are_not_released_while_they_are_read(code, early):
    assert _early_releases(code) == early


def test_descriptors_are_checked_once_and_keep_no_tensor_alive():
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from megafold.evoflash3d.hopper import launch
    from megafold.gluon_descriptors import checked

    one, other = problem(), problem()
    first, second = (launch._rows(p, p.q, 64) for p in (one, other))
    assert launch._rows(one, one.q, 64) is first and launch._rows(one, one.q, 128) is not first
    assert first.base is one.q and second.base is other.q
    assert first.layout is second.layout and first.strides[1:] == list(one.q.stride()[1:])
    assert checked(tuple(first.shape), tuple(first.strides), tuple(first.block_shape), BF16).base is None


def loops_that_start_anew(ttgir: str) -> list[str]:
    """Outer loops of a module (those with a loop inside) that carry nothing from one turn to the next."""
    lines = ttgir.splitlines()
    loops = [(len(line) - len(line.lstrip()), line.strip()) for line in lines if "scf.for" in line]
    outer = [line for (depth, line), (inner, _) in itertools.pairwise(loops) if inner > depth]
    return [line for line in outer if "iter_args" not in line]


@functools.cache
def compiled(kernel: str) -> dict[str, str]:
    """Stages of a Hopper kernel at head dim 32, by name ("ttgir", "ptx")."""
    import triton

    from megafold.evoflash3d.hopper import offline

    found, compile_one = [], triton.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "compile", lambda *a, **k: found.append(compile_one(*a, **k)) or found[-1])
        next(case for case in offline.cases() if case.kernel == kernel and case.head_dim == 32).compile()
    return found[0].asm


@pytest.mark.gate
@pytest.mark.parametrize("kernel", ["forward", "queries", "keys", "bias"])
def test_stages_are_counted_on_from_item_to_item(kernel):
    """Who fills stages and who reads them count them alike: a count that starts anew with an item waits forever."""
    ttgir = compiled(kernel)["ttgir"]
    assert ttgir.count("scf.for") >= 4
    assert loops_that_start_anew(ttgir) == []


@pytest.mark.gate
def test_stages_of_whole_rows_follow_from_the_indices_of_the_loops():
    """Nothing is carried beside these loops but sums of dk and dv, so that there is no count to lose."""
    loops = [line.strip() for line in compiled("rows")["ttgir"].splitlines() if "scf.for" in line]
    assert len(loops) == 4 * 3  # four groups of warps; items, blocks of keys, tiles of queries
    carried = [line.split("iter_args", 1)[1] for line in loops if "iter_args" in line]
    assert len(carried) == 2 and all("-> (tensor<64x32xf32" in line for line in carried)


@pytest.mark.gate
@pytest.mark.parametrize("kernel", ["forward", "queries", "keys", "bias", "rows"])
def test_addresses_that_grow_with_a_call_are_made_in_64_bits(kernel):
    """Bases of a row, and its items; 32 bits only for the columns within a row, or what is added to one base."""
    steps = re.findall(r"tt\.addptr .* : (!tt\.ptr|tensor)<(.*)", compiled(kernel)["ttgir"])
    bases = [rest for kind, rest in steps if kind == "!tt.ptr"]
    items = [rest for kind, rest in steps if kind == "tensor" and "x1x!tt.ptr" in rest]
    assert bases and all(rest.split(", ")[1].startswith("i64") for rest in bases)
    assert all("xi64" in rest for rest in items)
