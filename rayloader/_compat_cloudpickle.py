"""Every private name of cloudpickle that rayloader uses: where to look when a new version of it differs."""

from __future__ import annotations

from rayloader.needs import private_names_of

with private_names_of("cloudpickle"):
    from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_CLASS as ids_by_class
    from cloudpickle.cloudpickle import _DYNAMIC_CLASS_TRACKER_BY_ID as classes_by_id
    from cloudpickle.cloudpickle import _class_setstate as fill_class
    from cloudpickle.cloudpickle import _get_or_create_tracker_id as id_of_class
    from cloudpickle.cloudpickle import _make_skeleton_class as make_class
    from cloudpickle.cloudpickle import _make_skeleton_enum as make_enum

__all__ = ["classes_by_id", "fill_class", "id_of_class", "ids_by_class", "make_class", "make_enum"]
