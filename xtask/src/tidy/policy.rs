//! What tidy allows, as data.

/// What one crate may do. A crate without a row here is an error.
pub(super) struct CratePolicy {
    pub(super) name: &'static str,
    /// Crates of this workspace that it may depend on. Besides these, every crate may have
    /// [`JUDGE`] as a dev-dependency.
    pub(super) uses: &'static [&'static str],
    /// Crates from outside that it may depend on (dev-dependencies are free), if they are counted.
    pub(super) outside: Outside,
    /// Files and folders of the crate where `unsafe` may stand. If there are none, the crate must
    /// `forbid(unsafe_code)`.
    pub(super) unsafe_in: &'static [&'static str],
}

/// Which crates from outside the workspace may be used.
pub(super) enum Outside {
    /// Any, except those that [`RESERVED`] gives to another crate.
    Any,
    /// These only.
    Only(&'static [&'static str]),
}

/// The simulated device: a dev-dependency anywhere.
pub(super) const JUDGE: &str = "mock-backend";

/// Pairs of crates: the first may have the second as a dev-dependency, though it may not depend on it.
pub(super) const FOR_TESTS: &[(&str, &str)] =
    &[("alloc-cuda", "alloc-ipc"), ("alloc-cuda", "alloc-shm")];

/// Core names no backend, backends do not name each other, and nothing depends on a front end.
pub(super) const CRATES: &[CratePolicy] = &[
    CratePolicy {
        name: "alloc-core",
        uses: &[],
        outside: Outside::Only(&[
            "hashbrown",
            "loom",
            "shuttle",
            "parking_lot",
            "smallvec",
            "spin",
        ]),
        unsafe_in: &[],
    },
    CratePolicy {
        name: "mock-backend",
        uses: &["alloc-core"],
        outside: Outside::Any,
        unsafe_in: &[],
    },
    CratePolicy { name: "alloc-api", uses: &["alloc-core"], outside: Outside::Any, unsafe_in: &[] },
    CratePolicy { name: "cuda-driver", uses: &[], outside: Outside::Any, unsafe_in: &["src"] },
    CratePolicy {
        name: "alloc-cuda",
        uses: &["alloc-core", "cuda-driver"],
        outside: Outside::Any,
        unsafe_in: &["src/stream", "src/buffer", "src/interop", "src/ipc", "src/tests", "tests"],
    },
    CratePolicy {
        name: "alloc-host-cuda",
        uses: &["alloc-core", "cuda-driver"],
        outside: Outside::Any,
        unsafe_in: &["src/pinned"],
    },
    CratePolicy {
        name: "alloc-shm",
        uses: &["alloc-core"],
        outside: Outside::Any,
        unsafe_in: &[
            "src/os",
            "src/map",
            "src/memfd",
            "src/arena/allocator",
            "src/arena/block",
            "src/arena/import",
        ],
    },
    CratePolicy {
        // Generic over the traits of sharing: it names no backend.
        name: "alloc-ipc",
        uses: &["alloc-core", "alloc-shm"],
        outside: Outside::Any,
        unsafe_in: &[],
    },
    CratePolicy {
        name: "alloc-cpu",
        uses: &["alloc-api", "alloc-core"],
        outside: Outside::Any,
        unsafe_in: &["src/aligned"],
    },
    CratePolicy {
        name: "memory-manager",
        uses: &["alloc-api", "alloc-core", "alloc-cuda", "alloc-host-cuda", "cuda-driver"],
        outside: Outside::Any,
        unsafe_in: &["src/abi", "src/cuda", "tests/gpu", "tests/c"],
    },
    CratePolicy {
        // On a GPU it measures, and shows that the simulator predicts; the driver is loaded at run time.
        name: "alloc-lab",
        uses: &["alloc-core", "alloc-cuda", "mock-backend"],
        outside: Outside::Any,
        unsafe_in: &[],
    },
    CratePolicy {
        name: "alloc-torch",
        uses: &["alloc-core", "alloc-cuda"],
        outside: Outside::Any,
        unsafe_in: &["src/abi"],
    },
    CratePolicy { name: "xtask", uses: &[], outside: Outside::Any, unsafe_in: &[] },
];

/// A crate from outside that one crate alone may depend on or name, a few files apart.
pub(super) struct Reserved {
    pub(super) name: &'static str,
    pub(super) owner: &'static str,
    /// Files and folders elsewhere that may name it, and whose crates may depend on it.
    pub(super) guests: &'static [&'static str],
}

/// All of them. alloc-cuda offers conversions to and from cudarc's safe types.
pub(super) const RESERVED: &[Reserved] = &[Reserved {
    name: "cudarc",
    owner: "cuda-driver",
    guests: &[
        "crates/alloc-cuda/src/interop.rs",
        "crates/alloc-cuda/examples/cudarc.rs",
        "crates/alloc-cuda/tests/gpu/child.rs",
    ],
}];

impl Reserved {
    /// Whether `path`, of the whole workspace, may name it.
    pub(super) fn is_home(&self, path: &str) -> bool {
        let own = path.strip_prefix("crates/").and_then(|rest| rest.strip_prefix(self.owner));
        own.is_some_and(|rest| rest.starts_with('/'))
            || self.guests.iter().any(|guest| covers(guest, path))
    }

    /// Whether the crate `name` may depend on it.
    pub(super) fn may_depend(&self, name: &str) -> bool {
        let folder = format!("crates/{name}/");
        name == self.owner || self.guests.iter().any(|guest| guest.starts_with(&folder))
    }
}

/// Lines that a file may have.
pub(super) const LINES_MAX: usize = 800;

/// Files, or folders, that may be longer, and why.
pub(super) const LONG_FILES: &[(&str, &str)] = &[
    ("Cargo.lock", "generated"),
    ("crates/alloc-core/tests/host/rules.rs", "one test for each rule of the pinned allocator"),
];

/// The row of a crate.
pub(super) fn of(name: &str) -> Option<&'static CratePolicy> {
    CRATES.iter().find(|row| row.name == name)
}

/// Whether `path` is `entry`, the Rust file of that name, or inside the folder of that name.
pub(super) fn covers(entry: &str, path: &str) -> bool {
    path.strip_prefix(entry)
        .is_some_and(|rest| rest.is_empty() || rest == ".rs" || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_name_only_crates_that_have_rows() {
        let reserved = RESERVED.iter().map(|reserved| &reserved.owner);
        for name in CRATES.iter().flat_map(|row| row.uses).chain(reserved).chain([&JUDGE]) {
            assert!(of(name).is_some(), "{name}");
        }
    }

    #[test]
    fn an_entry_covers_its_file_and_its_folder_only() {
        assert!(covers("src/os", "src/os.rs"));
        assert!(covers("src/os", "src/os/linux.rs"));
        assert!(covers("src", "src/lib.rs"));
        assert!(covers("tests/abi.rs", "tests/abi.rs"));
        assert!(!covers("src/os", "src/os_extra.rs"));
        assert!(!covers("src", "tests/it.rs"));
    }
}
