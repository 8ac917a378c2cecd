"""The bundled facts: an almanac of invented towns, one table a split.

Invented, so that no model knows an answer without looking it up. A key ends in two arbitrary letters, so that it
cannot be guessed from the town and the attribute. The splits share no town, no key and no number.
This file knows nothing of tasks or tools.
"""

from collections.abc import Mapping
from typing import Literal, get_args

Split = Literal["train", "test"]
Value = int | str

ATTRIBUTES = ("bridges", "trees", "height", "wells", "families", "founded")
"""The numeric ones; the text attribute `twin` names another town of the same split."""

_FACTS: Mapping[Split, Mapping[str, Value]] = {
    "train": {
        "alder_bridges_zv": 30,
        "alder_trees_xj": 562,
        "alder_height_xw": 72,
        "alder_wells_hf": 42,
        "alder_families_ng": 8316,
        "alder_founded_zc": 1092,
        "alder_twin_rv": "Cairn",
        "brook_bridges_hb": 43,
        "brook_trees_xd": 951,
        "brook_height_cj": 64,
        "brook_wells_kb": 58,
        "brook_families_pv": 8601,
        "brook_founded_jx": 1605,
        "brook_twin_kn": "Dunmore",
        "cairn_bridges_bd": 33,
        "cairn_trees_mt": 568,
        "cairn_height_dm": 96,
        "cairn_wells_kx": 22,
        "cairn_families_fr": 5735,
        "cairn_founded_nr": 1110,
        "cairn_twin_db": "Elford",
        "dunmore_bridges_bj": 56,
        "dunmore_trees_cw": 314,
        "dunmore_height_rt": 85,
        "dunmore_wells_jm": 6,
        "dunmore_families_dn": 6519,
        "dunmore_founded_bt": 1340,
        "dunmore_twin_fg": "Fenwick",
        "elford_bridges_fb": 17,
        "elford_trees_vw": 161,
        "elford_height_vx": 73,
        "elford_wells_gt": 14,
        "elford_families_tj": 7287,
        "elford_founded_mn": 1000,
        "elford_twin_hr": "Alder",
        "fenwick_bridges_fc": 40,
        "fenwick_trees_jv": 249,
        "fenwick_height_bp": 77,
        "fenwick_wells_dd": 55,
        "fenwick_families_jk": 2476,
        "fenwick_founded_qq": 1015,
        "fenwick_twin_vg": "Brook",
    },
    "test": {
        "garth_bridges_wg": 39,
        "garth_trees_rh": 987,
        "garth_height_nk": 70,
        "garth_wells_kj": 54,
        "garth_families_zj": 3596,
        "garth_founded_rw": 1703,
        "garth_twin_dt": "Ivybridge",
        "hollin_bridges_ff": 5,
        "hollin_trees_xm": 139,
        "hollin_height_rm": 76,
        "hollin_wells_wn": 28,
        "hollin_families_hd": 9520,
        "hollin_founded_kw": 1129,
        "hollin_twin_zd": "Garth",
        "ivybridge_bridges_jj": 19,
        "ivybridge_trees_vk": 866,
        "ivybridge_height_hn": 63,
        "ivybridge_wells_xg": 25,
        "ivybridge_families_qg": 2510,
        "ivybridge_founded_px": 1461,
        "ivybridge_twin_gc": "Hollin",
    },
}


def facts(split: Split) -> Mapping[str, Value]:
    """Every fact of a split, by key."""
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}; expected 'train' or 'test'")
    return _FACTS[split]


def towns(split: Split) -> list[str]:
    """The towns of a split, lower case, in the order of the table."""
    return list(dict.fromkeys(key.split("_")[0] for key in facts(split)))


def key_of(split: Split, town: str, attribute: str) -> str:
    """The key of one fact."""
    found = [key for key in facts(split) if key.startswith(f"{town}_{attribute}_")]
    if len(found) != 1:
        raise KeyError(f"split {split!r} has {len(found)} facts for town {town!r}, attribute {attribute!r}; expected 1")
    return found[0]
