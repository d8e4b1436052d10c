"""Residues of the sequence that the experiment did not resolve: kept as tokens, with every atom masked.

The baseline drops them: its residue indices close up, and an alignment of the full sequence no longer fits (a known
report for 7a4d). AF3 keeps them. Here the baseline's `Biomolecule` is completed before anything is computed from it,
so that the features are exactly what the baseline's own code computes for a structure that has those residues and no
atom of them. Where everything is resolved the `Biomolecule` is returned as it is.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from megafold.evopipe.report import Log, listed

RNA, DNA = "RNA", "DNA"


def complete(mmcif_object, biomolecule, log: Log) -> tuple[Any, np.ndarray]:
    """The `Biomolecule` with its unresolved polymer residues, numbered 1, 2, ... along the full sequence of each chain.

    Also where each of its tokens comes from: rows of the one given, -1 for an unresolved residue.

    An unresolved modified residue is represented by its parent (MSE by MET), because the baseline represents a
    modified residue by its resolved atoms alone. A residue of unknown type has no parent: it is left out, and its
    number stays unused.

    Args:
        mmcif_object: the baseline's `MmcifObject`; its sequences come from the file's `_pdbx_poly_seq_scheme`.
        biomolecule: made from it.
        log: where the residues are told.
    """
    parts, kept, replaced, lost, new_components = [], {}, [], [], {}
    first = _blank(biomolecule)
    for chain in dict.fromkeys(biomolecule.chain_id.tolist()):
        rows = np.flatnonzero(biomolecule.chain_id == chain)
        by_number: dict[int, list[int]] = {}
        for row in rows:
            by_number.setdefault(int(biomolecule.residue_index[row]), []).append(int(row))
        components, places = mmcif_object.all_chem_comp_details[chain], mmcif_object.seqres_to_structure[chain]
        resolved = 0
        for number, component in enumerate(components, 1):
            resolved += not places[number - 1].is_missing
            mine = [] if places[number - 1].is_missing else by_number.pop(resolved, [])
            if mine:
                parts += [(row, number, None) for row in mine]
                continue
            if not _is_polymer(component):
                continue
            known = _parent(component)
            if known is None:
                lost.append(f"{component.id} {number} of {chain}")
                continue
            kept[chain] = kept.get(chain, 0) + 1
            if known.id != component.id:
                replaced.append(f"{component.id} as {known.id}")
            new_components[known.id] = known
            parts.append((int(rows[0]), number, known))
        # rows that the sequence does not mention keep their place at the end
        parts += [(row, number + len(components), None) for number, left in by_number.items() for row in left]
    _tell(kept, replaced, lost, log)
    if not kept and all(biomolecule.residue_index[row] == number for row, number, _ in parts):
        return biomolecule, np.arange(len(biomolecule.chain_id))
    origin = np.array([row if component is None else -1 for row, _, component in parts])
    return _assembled(biomolecule, parts, first, new_components), origin


def _tell(kept: dict[str, int], replaced: list[str], lost: list[str], log: Log) -> None:
    if kept:
        where = ", ".join(f"{chain} {count}" for chain, count in kept.items())
        log.note("unresolved residues", f"residues without coordinates are kept, their atoms masked: {where}")
    if replaced:
        log.changed("unresolved modified residues", f"modified residues without coordinates: {listed(replaced)}")
    if lost:
        reason = f"residues of unknown type without coordinates are left out: {listed(lost)}"
        log.changed("unresolved unknown residues", reason, "name their parent in _entity_poly_seq if it is known")


def _blank(biomolecule) -> dict[str, Any]:
    shape = biomolecule.atom_mask.shape[1:]
    zeros = np.zeros(shape, biomolecule.atom_mask.dtype)
    return {"atom_mask": zeros, "atom_positions": np.zeros((*shape, 3)), "b_factors": np.zeros(shape)}


def _assembled(biomolecule, parts, blank: dict[str, Any], new_components: dict[str, Any]):
    rows = np.array([row for row, _, _ in parts])
    names = ("atom_positions", "atom_mask", "b_factors", "atom_name", "restype", "chain_index", "chain_id", "chemid",
             "chemtype")  # fmt: skip
    fields = {name: getattr(biomolecule, name)[rows] for name in names}
    width = max([1, *(len(one) for one in new_components)])
    fields["chemid"] = fields["chemid"].astype(f"<U{max(width, fields['chemid'].dtype.itemsize // 4)}")
    fields["atom_name"] = fields["atom_name"].astype("<U8")
    for i, (_, _, component) in enumerate(parts):
        if component is None:
            continue
        constants = _constants(component.type)
        for name, value in blank.items():
            fields[name][i] = value
        letter = constants.restype_3to1[component.id]
        fields["restype"][i] = constants.restype_order[letter]
        fields["chemtype"][i], fields["chemid"][i] = constants.chemtype_num, component.id
        fields["atom_name"][i] = constants.atom_types[constants.res_rep_atom_index]
    known = {component.id for component in biomolecule.chem_comp_table}
    added = {component for id, component in new_components.items() if id not in known}
    numbers = np.array([number for _, number, _ in parts], biomolecule.residue_index.dtype)
    return replace(
        biomolecule, **fields, residue_index=numbers, chem_comp_table=set(biomolecule.chem_comp_table) | added
    )


def _is_polymer(component) -> bool:
    from alphafold3_pytorch.utils.data_utils import is_polymer

    return is_polymer(component.type)


def _constants(kind: str):
    from alphafold3_pytorch.common.biomolecule import get_residue_constants

    return get_residue_constants(res_chem_type=kind)


@lru_cache(maxsize=4096)
def _parent(component):
    """The standard component (a `ChemComp`) that stands for an unresolved one; None where there is none."""
    import gemmi
    from alphafold3_pytorch.data.mmcif_parsing import ChemComp

    constants = _constants(component.type)
    if constants.restype_3to1.get(component.id, "X") != "X":
        return component
    kind = component.type.upper()
    polymer = gemmi.ResidueKind.DNA if DNA in kind else gemmi.ResidueKind.RNA if RNA in kind else gemmi.ResidueKind.AA
    letter = gemmi.find_tabulated_residue(component.id).one_letter_code.upper()
    name = gemmi.expand_one_letter(letter, polymer) if letter.isalpha() else None
    if name is None or constants.restype_3to1.get(name, "X") == "X":
        return None
    return ChemComp(id=name, formula="?", formula_weight="0.0", mon_nstd_flag="y", name=name, type=component.type)
