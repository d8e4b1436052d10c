"""The full sequence of each polymer of an mmCIF file, with the residues that the experiment did not resolve.

Looked for in `_pdbx_poly_seq_scheme`, `_entity_poly_seq` and `_entity_poly` (one-letter codes), in this order, because
files from outside the wwPDB often lack some of them. A sequence that contradicts the coordinates is not used.
"""

from __future__ import annotations

import re
from collections import defaultdict

from megafold.evopipe.report import Log
from megafold.evopipe.residues import UNSET, Residue


def of_chains(block, residues: list[Residue], log: Log) -> dict[str, list[str]]:
    """Asym id -> the components of its full sequence, for each polymer chain that has coordinates.

    Every resolved residue's `number` is its place in the list, from 1; it is set here, where the file gives none or
    its sequence cannot be used: then the sequence is that of the resolved residues.

    Args:
        block: a `gemmi.cif.Block`.
        residues: of the whole file; `polymer` is set.
        log: where sequences that are missing or not usable are told.
    """
    schemes = _schemes(block)
    entities = _entity_sequences(block)
    by_asym: dict[str, list[Residue]] = defaultdict(list)
    for residue in residues:
        if residue.polymer:
            by_asym[residue.asym].append(residue)
    result, missing, wrong = {}, [], []
    for asym, mine in by_asym.items():
        known = [schemes.get(asym), schemes.get(re.sub(r"-\d+$", "", asym)), entities.get(mine[0].entity)]
        found = [full for full in known if full]
        fitting = next((fitted for full in found if (fitted := _fitted(full, mine)) is not None), None)
        if fitting is not None:
            result[asym] = fitting
            continue
        (wrong if found else missing).append(asym)
        for number, residue in enumerate(mine, 1):
            residue.number = str(number)
        result[asym] = [residue.component for residue in mine]
    action = "add _entity_poly_seq to the file if residues between the resolved ones should count"
    if missing:
        log.note(
            "no sequence", f"no full sequence of chain {', '.join(missing)}: that of its coordinates is used", action
        )
    if wrong:
        reason = f"the sequence of chain {', '.join(wrong)} contradicts its coordinates, whose sequence is used"
        log.changed("contradicting sequence", reason, "correct _entity_poly_seq or label_seq_id")
    return result


def _schemes(block) -> dict[str, list[str]]:
    numbered: dict[str, dict[str, str]] = defaultdict(dict)
    for row in block.find("_pdbx_poly_seq_scheme.", ["asym_id", "seq_id", "mon_id"]):
        numbered[row.str(0)].setdefault(row.str(1), row.str(2))  # the first of several components in one place
    return {asym: full for asym, places in numbered.items() if (full := _in_order(places))}


def _entity_sequences(block) -> dict[str, list[str]]:
    import gemmi

    numbered: dict[str, dict[str, str]] = defaultdict(dict)
    for row in block.find("_entity_poly_seq.", ["entity_id", "num", "mon_id"]):
        numbered[row.str(0)].setdefault(row.str(1), row.str(2))
    result = {entity: full for entity, places in numbered.items() if (full := _in_order(places))}
    for row in block.find("_entity_poly.", ["entity_id", "type", "pdbx_seq_one_letter_code"]):
        kind = {
            "polypeptide": gemmi.ResidueKind.AA,
            "polydeoxy": gemmi.ResidueKind.DNA,
            "polyribo": gemmi.ResidueKind.RNA,
        }
        known = [value for prefix, value in kind.items() if row.str(1).lower().startswith(prefix)]
        letters = "".join(row.str(2).split())
        if row.str(0) not in result and known and letters not in UNSET:
            try:
                result[row.str(0)] = gemmi.expand_one_letter_sequence(letters, known[0])
            except (RuntimeError, ValueError):  # an unbalanced parenthesis, a letter that is no residue
                continue
    return result


def _in_order(places: dict[str, str]) -> list[str] | None:
    """Components 1, 2, ... without a gap, or None."""
    try:
        numbers = {int(number): component for number, component in places.items()}
    except ValueError:
        return None
    return [numbers[i] for i in sorted(numbers)] if sorted(numbers) == list(range(1, len(numbers) + 1)) else None


def _fitted(full: list[str], residues: list[Residue]) -> list[str] | None:
    """The sequence with what is resolved in its places; None where the two contradict each other."""
    fitted, places = list(full), []
    for residue in residues:
        place = int(residue.number) - 1 if residue.number.isdigit() else -1
        if not 0 <= place < len(full):
            return None
        places.append(place)
        fitted[place] = residue.component
    differing = sum(a != b for a, b in zip(full, fitted))
    if places != sorted(set(places)) or differing > max(1, len(full) // 10):  # heterogeneity and UNK may differ
        return None
    return fitted
