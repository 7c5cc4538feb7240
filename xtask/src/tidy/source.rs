//! Just enough of Rust's grammar to tell code from comments and literals.

/// What a run of source that is not code is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Span {
    Comment,
    Literal,
}

/// `source` with comments and string and character literals replaced by blanks. Lines stay lines.
pub(super) fn without_comments_and_literals(source: &str) -> String {
    blank(source, |_| true)
}

/// `source` with comments replaced by blanks.
pub(super) fn without_comments(source: &str) -> String {
    blank(source, |span| span == Span::Comment)
}

/// The lines, counted from 1, where `word` stands by itself and not as a part of a longer name. A
/// line with two of them comes twice.
pub(super) fn lines_with<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    text.lines().enumerate().flat_map(move |(index, line)| {
        line.match_indices(word)
            .filter(|(at, _)| stands_alone(line, *at, word))
            .map(move |_| index + 1)
    })
}

fn stands_alone(line: &str, at: usize, word: &str) -> bool {
    let before = line[..at].chars().next_back();
    let after = line[at + word.len()..].chars().next();
    let starts_name = word.starts_with(is_name);
    let ends_name = word.ends_with(is_name);
    !(starts_name && before.is_some_and(is_name) || ends_name && after.is_some_and(is_name))
}

fn is_name(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

fn blank(source: &str, blanked: impl Fn(Span) -> bool) -> String {
    let mut out = String::with_capacity(source.len());
    let mut at = 0;
    while let Some(character) = source[at..].chars().next() {
        let Some((span, len)) = span_at(source, at) else {
            out.push(character);
            at += character.len_utf8();
            continue;
        };
        let text = &source[at..at + len];
        if blanked(span) {
            out.extend(text.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        } else {
            out.push_str(text);
        }
        at += len;
    }
    out
}

/// The comment or literal that starts at byte `at`, and its length in bytes.
fn span_at(source: &str, at: usize) -> Option<(Span, usize)> {
    let rest = &source[at..];
    if rest.starts_with("//") {
        return Some((Span::Comment, rest.find('\n').unwrap_or(rest.len())));
    }
    if rest.starts_with("/*") {
        return Some((Span::Comment, block_comment_len(rest)));
    }
    if rest.starts_with('"') {
        return Some((Span::Literal, quoted_len(rest, '"')));
    }
    let len = if rest.starts_with('\'') {
        char_literal_len(rest)
    } else if rest.starts_with('r') && may_start_raw(&source[..at]) {
        raw_string_len(rest)
    } else {
        None
    };
    len.map(|len| (Span::Literal, len))
}

/// Length of a block comment; they nest.
fn block_comment_len(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// Length of a literal between two `quote`s, with backslash escapes.
fn quoted_len(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, character) in rest.char_indices().skip(1) {
        if escaped {
            escaped = false;
        } else if character == '\\' {
            escaped = true;
        } else if character == quote {
            return at + quote.len_utf8();
        }
    }
    rest.len()
}

/// Length of a character literal, or `None` for a lifetime.
fn char_literal_len(rest: &str) -> Option<usize> {
    let mut characters = rest.chars().skip(1);
    let first = characters.next()?;
    let is_literal = first == '\\' || characters.next() == Some('\'');
    is_literal.then(|| quoted_len(rest, '\''))
}

/// Whether an `r` after `before` may be the prefix of a raw string, not the end of a name.
fn may_start_raw(before: &str) -> bool {
    let mut backwards = before.chars().rev();
    match backwards.next() {
        Some('b' | 'c') => !backwards.next().is_some_and(is_name),
        other => !other.is_some_and(is_name),
    }
}

/// Length of `r"…"`, `r#"…"#` and so on, or `None` for a raw name (`r#type`).
fn raw_string_len(rest: &str) -> Option<usize> {
    let hashes = rest[1..].bytes().take_while(|&byte| byte == b'#').count();
    let body = rest[1 + hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let opening = rest.len() - body.len();
    Some(body.find(&end).map_or(rest.len(), |at| opening + at + end.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, code: &str) {
        let blanked = without_comments_and_literals(source);
        assert_eq!(blanked.lines().count(), source.lines().count(), "{source}");
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(words(&blanked), words(code), "{source}");
    }

    #[test]
    fn comments_and_literals_are_blanked() {
        check("a // unsafe\nb", "a\nb");
        check("a /* x /* y */ \n unsafe */ b", "a b");
        check(r#"f("unsafe \" unsafe", x)"#, "f( , x)");
        check(r##"f(r#"unsafe " unsafe"#, br"\", cr"x")"##, "f( , b , c )");
        check(r"f('\'', 'x', '\u{1F600}', '\\', 'é')", "f( , , , , )");
    }

    #[test]
    fn lifetimes_and_raw_names_are_code() {
        check(
            "fn f<'a>(x: &'a str, y: &'static r#type) {}",
            "fn f<'a>(x: &'a str, y: &'static r#type) {}",
        );
        check("for r in 'a'..='z' { our\"text\" }", "for r in ..= { our }");
    }

    #[test]
    fn an_unclosed_literal_ends_with_the_file() {
        check("a \"b", "a");
        check("a /* b", "a");
        check("a r#\"b\"", "a");
    }

    #[test]
    fn comments_alone_can_be_blanked() {
        assert_eq!(without_comments("x(\"// no\") // yes"), "x(\"// no\")       ");
    }

    #[test]
    fn words_are_whole() {
        let text = "unsafe {\n#![forbid(unsafe_code)]\nnot_unsafe; unsafe unsafe\ntodo!()";
        assert_eq!(lines_with(text, "unsafe").collect::<Vec<_>>(), [1, 3, 3]);
        assert_eq!(lines_with(text, "todo!").collect::<Vec<_>>(), [4]);
    }
}
