#pragma once
#include <nanobind/nanobind.h>

void register_isa(nanobind::module_& m);
void register_threads(nanobind::module_& m);
void register_store(nanobind::module_& m);
void register_batch(nanobind::module_& m);
void register_features(nanobind::module_& m);
void register_packed(nanobind::module_& m);
void register_onebit(nanobind::module_& m);
void register_row_sums(nanobind::module_& m);
void register_row_copies(nanobind::module_& m);
void register_change_filter(nanobind::module_& m);
void register_values(nanobind::module_& m);
void register_checksum(nanobind::module_& m);
void register_served(nanobind::module_& m);
void register_disk(nanobind::module_& m);
