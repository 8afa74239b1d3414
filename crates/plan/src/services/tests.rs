//! Tests of the planner. Each table and test names the rules that it covers.

mod annotated;
mod condition_table;
mod duplicates;
mod fixtures;
mod headless;
mod histories;
mod network_status;
mod packing;
mod rules;
mod scale;
mod status;
mod store;
mod upstream;
