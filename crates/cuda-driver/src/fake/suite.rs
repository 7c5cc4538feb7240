//! Test programs that run on a GPU and on the imitation.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

/// Exit code of a program that needs a GPU and finds none.
pub const NO_GPU: u8 = 77;

/// What became of a test that did not fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It was run.
    Done,
    /// It could not be run here, and why.
    Skipped(&'static str),
}

/// The code of a test: it runs on a rig `R` and panics if it fails.
pub type TestBody<R> = fn(&R) -> Outcome;

/// A test and its name.
pub type Test<R> = (&'static str, TestBody<R>);

/// Where the tests of a program run. It takes the place of the usual test harness, which has no word
/// for a test that cannot be run, and would run tests side by side.
///
/// ```
/// use cuda_driver::fake::{Outcome, Session, Suite};
/// use std::process::ExitCode;
///
/// fn one_device(rig: &Session) -> Outcome {
///     assert_eq!(rig.driver().device_count().unwrap(), 1);
///     Outcome::Done
/// }
///
/// let suite = Suite {
///     tests: vec![("one_device", one_device)],
///     on_gpu: || Err("this example needs none".to_owned()),
///     test_on_gpu: |rig: &Session, test| test(rig),
///     test_on_imitation: |test| test(&Session::new(&[1 << 20])),
/// };
/// assert_eq!(suite.run(&[]), ExitCode::SUCCESS);
/// assert_eq!(suite.run(&["--require-gpu".to_owned()]), ExitCode::from(77));
/// ```
#[derive(Debug)]
pub struct Suite<R> {
    /// The tests, in the order in which they run.
    pub tests: Vec<Test<R>>,
    /// Makes the rig for the GPUs of the machine, or says why there is none.
    pub on_gpu: fn() -> Result<R, String>,
    /// Runs one test on that rig.
    pub test_on_gpu: fn(&R, TestBody<R>) -> Outcome,
    /// Runs one test on a fresh imitation.
    pub test_on_imitation: fn(TestBody<R>) -> Outcome,
}

impl<R> Suite<R> {
    /// Runs the tests on a GPU, if there is one, and on the imitation, and prints a line for each.
    /// Arguments of the program:
    ///
    /// * `--require-gpu`: on a GPU only; without one exits with [`NO_GPU`].
    /// * a word: only tests whose name contains it.
    /// * `--list`: names only.
    ///
    /// Other options are cargo's for its own harness, and mean nothing here.
    pub fn run(&self, arguments: &[String]) -> ExitCode {
        let has = |option: &str| arguments.iter().any(|argument| argument == option);
        let words: Vec<&String> =
            arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
        let is_wanted =
            |name: &str| words.is_empty() || words.iter().any(|word| name.contains(word.as_str()));
        let tests: Vec<&Test<R>> = self.tests.iter().filter(|(name, _)| is_wanted(name)).collect();
        if has("--list") {
            tests.iter().for_each(|(name, _)| println!("{name}: test"));
            return ExitCode::SUCCESS;
        }
        let mut failed = 0;
        match (self.on_gpu)() {
            Ok(rig) => failed += run("CUDA", &tests, |test| (self.test_on_gpu)(&rig, test)),
            Err(reason) => {
                println!("skipped: no CUDA device ({reason})");
                if has("--require-gpu") {
                    return ExitCode::from(NO_GPU);
                }
            }
        }
        if !has("--require-gpu") {
            failed += run("the imitation of the driver", &tests, self.test_on_imitation);
        }
        if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

/// Runs tests one after another; how many failed.
fn run<R>(place: &str, tests: &[&Test<R>], on: impl Fn(TestBody<R>) -> Outcome) -> usize {
    println!("\nrunning {} tests on {place}", tests.len());
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    for (name, test) in tests {
        // On a machine that cannot be looked at, tells which test hangs.
        println!("begin {name}");
        let start = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| on(*test)));
        let took = start.elapsed().as_millis();
        let verdict = match outcome {
            Ok(Outcome::Done) => {
                passed += 1;
                format!("ok ({took} ms)")
            }
            Ok(Outcome::Skipped(why)) => {
                skipped += 1;
                format!("skipped: {why}")
            }
            Err(_) => {
                failed += 1;
                format!("FAILED ({took} ms)")
            }
        };
        println!("test {name} ... {verdict}");
    }
    let result = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "test result: {result}. {passed} passed; {failed} failed; {skipped} skipped; on {place}"
    );
    failed
}

#[cfg(test)]
mod tests {
    use super::*;

    fn suite(on_gpu: fn() -> Result<u32, String>) -> Suite<u32> {
        Suite {
            tests: vec![
                ("well", |_| Outcome::Done),
                ("not_here", |_| Outcome::Skipped("a reason")),
                ("only_on_seven", |rig| {
                    assert_eq!(*rig, 7);
                    Outcome::Done
                }),
            ],
            on_gpu,
            test_on_gpu: |rig, test| test(rig),
            test_on_imitation: |test| test(&7),
        }
    }

    fn words(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn a_failure_anywhere_is_told() {
        let absent = suite(|| Err("none".to_owned()));
        assert_eq!(absent.run(&[]), ExitCode::SUCCESS);
        assert_eq!(absent.run(&words(&["--require-gpu"])), ExitCode::from(NO_GPU));
        let present = suite(|| Ok(8));
        assert_eq!(present.run(&[]), ExitCode::FAILURE);
        assert_eq!(present.run(&words(&["--require-gpu", "--nocapture"])), ExitCode::FAILURE);
        assert_eq!(present.run(&words(&["well", "here"])), ExitCode::SUCCESS);
        assert_eq!(present.run(&words(&["--list"])), ExitCode::SUCCESS);
    }
}
