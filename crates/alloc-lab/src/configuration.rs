//! Which allocator is replayed on: a policy and a settings string.

/// Memory of the device that is simulated if nobody says otherwise, in bytes: an NVIDIA H200, the
/// one on which the recordings were made.
pub const DEFAULT_CAPACITY: u64 = 150_109_880_320;

/// How the allocator decides.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum PolicyName {
    /// Exactly as PyTorch does
    Pytorch,
    /// Our own rules: less memory, fewer waits
    Ours,
}

impl PolicyName {
    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            PolicyName::Pytorch => "pytorch",
            PolicyName::Ours => "ours",
        }
    }
}

/// A policy with its settings.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Configuration {
    /// The policy.
    pub policy: PolicyName,
    /// A settings string as in `PYTORCH_ALLOC_CONF`; empty for the policy's defaults.
    pub conf: String,
}

impl Configuration {
    /// A policy with a settings string.
    pub fn new(policy: PolicyName, conf: impl Into<String>) -> Self {
        Configuration { policy, conf: conf.into() }
    }

    /// The configurations to compare: the ones asked for, or the standard ones. A settings string
    /// without a policy is tried with both.
    pub fn choose(policy: Option<PolicyName>, conf: Option<&str>) -> Vec<Self> {
        use PolicyName::{Ours, Pytorch};
        match (policy, conf) {
            (Some(policy), conf) => vec![Self::new(policy, conf.unwrap_or_default())],
            (None, Some(conf)) => vec![Self::new(Pytorch, conf), Self::new(Ours, conf)],
            (None, None) => vec![
                Self::new(Pytorch, ""),
                Self::new(Pytorch, "expandable_segments:True"),
                Self::new(Ours, ""),
            ],
        }
    }

    /// Short text for tables: the policy, and the settings if there are any.
    pub fn label(&self) -> String {
        format!("{} {}", self.policy.name(), self.conf).trim_end().to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_standard_comparison_is_made_unless_something_is_asked_for() {
        let labels = |policy, conf| {
            let all = Configuration::choose(policy, conf);
            all.iter().map(Configuration::label).collect::<Vec<_>>()
        };
        let standard = ["pytorch", "pytorch expandable_segments:True", "ours"];
        assert_eq!(labels(None, None), standard);
        assert_eq!(labels(Some(PolicyName::Ours), None), ["ours"]);
        assert_eq!(labels(None, Some("a:1")), ["pytorch a:1", "ours a:1"]);
        assert_eq!(labels(Some(PolicyName::Pytorch), Some("a:1")), ["pytorch a:1"]);
    }
}
