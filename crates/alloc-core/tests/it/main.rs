//! Tests of the device allocator on the simulated GPU, which judges every hand-out and release.
//!
//! * `cases_*`: real-world reports cut down to a sequence of operations, one test each;
//! * `machine`: random operations against the naive model, after every operation;
//! * `machine_moving`: longer runs of them in which memory moves, under the judge;
//! * `lasting`: sizes that live long, and where they go;
//! * `moving`: what a move costs, and which old views are used again and dropped;
//! * `faults`, `interleave`: a failure, or another thread's operation, at every backend call;
//! * `threads`: real threads;
//! * `pictures`: short scripts as maps of their segments;
//! * `shards`: threads on one stream with heaps of their own for small requests;
//! * `sharing`, `sharing_faults`: blocks that other simulated processes use;
//! * `waiting`: freed blocks that wait for requests of their size;
//! * `watching`: observers of memory that comes and goes;
//! * `errors`, `teardown`, `forgotten`: misuse, broken backends, and the end.
#![expect(clippy::unwrap_used, reason = "in a test a panic is the report, helpers included")]

mod captures;
mod cases_expandable;
mod cases_graphs;
mod cases_ladder;
mod cases_pools;
mod cases_sizes;
mod cases_stats;
mod cases_streams;
mod cases_threads;
mod checkpoints;
mod errors;
mod faults;
mod faults_graphs;
mod forgotten;
mod haste;
mod interleave;
mod lasting;
mod liar;
mod machine;
mod machine_graphs;
mod machine_moving;
mod moving;
mod pictures;
mod replay;
mod rig;
mod shards;
mod sharing;
mod sharing_faults;
mod sources;
mod teardown;
mod threads;
mod threads_graphs;
mod waiting;
mod watching;
