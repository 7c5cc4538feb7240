//! Which allocator is replayed on: a policy and a settings string.

use alloc_core::{Config, Policy};

use crate::error::Failure;

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
        self.policy().name()
    }

    /// The allocator's word for it.
    pub const fn policy(self) -> Policy {
        match self {
            PolicyName::Pytorch => Policy::Pytorch,
            PolicyName::Ours => Policy::Ours,
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

    /// The allocator's configuration.
    ///
    /// # Errors
    /// [`Failure::Usage`] if the settings string is wrong.
    pub fn config(&self) -> Result<Config, Failure> {
        let mut config = Config::of(self.policy.policy());
        config.apply(&self.conf).map_err(|e| Failure::Usage(format!("--conf: {e}")))?;
        Ok(config)
    }

    /// Whether segments are obtained as PyTorch obtains them by default, so that recorded addresses
    /// can be handed out.
    ///
    /// # Errors
    /// As [`config`](Self::config).
    pub fn takes_recorded_segments(&self) -> Result<bool, Failure> {
        let config = self.config()?;
        Ok(config.policy == Policy::Pytorch && config.settings.expandable_segments != Some(true))
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
