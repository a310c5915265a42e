"""What is read from the text of a partitioned program."""

import pytest

from rljax.planning.hlo import read_collectives

MESH = {"data": 1, "fsdp": 4, "expert": 2}

# A loop of 3 turns, one within it of 5 whose count only its condition tells, a fusion in which the
# TPU compiler hides a reduce-scatter, and a branch.
PROGRAM = """HloModule jit_update, is_scheduled=true

%all-reduce-scatter.1 (input: bf16[64]) -> bf16[16] {
  %input = bf16[64]{0} parameter(0)
  %all-reduce.1 = bf16[64]{0} all-reduce(%input), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
}

%inner_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ag = (f32[2]{0}, f32[8]{0:T(8,128)}) all-gather-start(%x), replica_groups=[2,4]<=[4,2]T(1,0), metadata={op_name="jit(update)/while/body/attention/convert"}
}

%inner_condition (p: (s32[], f32[8])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %constant.1), direction=LT
}

%outer_body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %while.1 = (s32[], f32[8]{0}) while(%t), condition=%inner_condition, body=%inner_body
  %fusion.1 = bf16[16]{0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.1
}

%outer_condition (p: (s32[], f32[8])) -> pred[] {
  ROOT %lt.1 = pred[] fusion(%i), kind=kLoop, calls=%compare
}

%branch (p: f32[10]) -> f32[10] {
  %all-to-all.1 = (f32[10]{0}, f32[10]{0}) all-to-all(%a, %b), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}
}

%never_called (p: f32[10]) -> f32[10] {
  %all-reduce.9 = f32[1000]{0} all-reduce(%p), replica_groups={}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %while.2 = (s32[], f32[8]{0}) while(%t), condition=%outer_condition, body=%outer_body, backend_config={"known_trip_count":{"n":"3"}}
  %conditional.1 = f32[10]{0} conditional(%b, %x, %y), branch_computations={%branch, %empty}
  %all-reduce.2 = f32[6]{0} all-reduce(%s), replica_groups={}, metadata={op_name="jit(update)/logprobs/sum"}
  %collective-permute.1 = f32[3]{0} collective-permute(%s), source_target_pairs={{0,0},{1,2},{2,1}}
  ROOT %all-reduce.3 = f32[6]{0} all-reduce(%s), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}
}
"""  # noqa: E501


@pytest.mark.smoke
def test_loops_groups_and_spellings():
    found = {(c.kind, c.axis): (c.bytes, c.why) for c in read_collectives(PROGRAM, MESH)}
    assert found == {
        ("all-gather", "fsdp"): (3 * 5 * 8 * 4 * 3 // 4, "15 times: attention 360 B"),
        ("reduce-scatter", "fsdp"): (3 * 64 * 2 * 3 // 4, "3 times: elsewhere 288 B"),
        ("all-to-all", "expert"): (2 * 10 * 4 // 2, "1 times: elsewhere 40 B"),
        ("all-reduce", "fsdp×expert"): (2 * 6 * 4 * 7 // 8, "1 times: logprobs 42 B"),
        ("collective-permute", "fsdp×expert"): (12, "1 times: elsewhere 12 B"),
    }


@pytest.mark.parametrize(
    ("groups", "axis", "ways"),
    [
        ("[4,2]<=[8]", "expert", 2),
        ("[2,4]<=[4,2]T(1,0)", "fsdp", 4),
        ("{{0,2},{1,3},{4,6},{5,7}}", "fsdp", 2),
        ("mesh['a'=4,'b'=2] {'a','b'}", "fsdp×expert", 8),
        ("mesh['a'=4,'b'=2] {'a':(2)2}", "fsdp", 2),
        ("mesh['a'=8] {'a':(4)2}", "expert", 2),
    ],
)
def test_the_groups_of_a_collective_name_its_mesh_axes(groups, axis, ways):
    text = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %r = f32[8]{{0}} reduce-scatter(%x), replica_groups={groups}\n}}"  # noqa: E501
    (found,) = read_collectives(text, MESH)
    assert (found.kind, found.axis, found.bytes) == ("reduce-scatter", axis, 32 * (ways - 1))
