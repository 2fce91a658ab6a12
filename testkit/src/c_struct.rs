//! The layout of structs in C headers, to compare it with that of Rust.

/// The members of a struct with their offsets, and at the end its size without a name. Only numbers of fixed size
/// (`u8` to `u64`) and arrays of them are known, which have their natural alignment.
///
/// # Panics
/// If the header has no such struct, or one with other members.
#[must_use]
pub fn c_struct<'a>(header: &'a str, name: &str) -> Vec<(&'a str, usize)> {
    let start = format!("struct {name} {{");
    let (_, after) = header.split_once(&start).expect("the header has this struct");
    let (body, _) = after.split_once("};").expect("it ends");
    let (mut members, mut at, mut alignment) = (Vec::new(), 0_usize, 1);
    // Without comments: each ends where another part of the text begins.
    let code = |part: &'a str| part.split_once("*/").map_or(part, |(_, code)| code);
    let declarations = body.split("/*").map(code).flat_map(|code| code.split(';'));
    for declaration in declarations {
        let Some((kind, names)) = declaration.trim().split_once(' ') else { continue };
        let bytes = match kind {
            "u8" => 1,
            "u16" => 2,
            "u32" => 4,
            "u64" => 8,
            other => panic!("the type {other} is not known"),
        };
        alignment = alignment.max(bytes);
        for member in names.split(',') {
            let (member, count) = match member.trim().split_once('[') {
                Some((member, count)) => {
                    (member, count.trim_end_matches(']').parse().expect("a number"))
                }
                None => (member.trim(), 1),
            };
            at = at.next_multiple_of(bytes);
            members.push((member, at));
            at += bytes * count;
        }
    }
    members.push(("", at.next_multiple_of(alignment)));
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_aligned_and_the_end_is_padded() {
        let header = "struct it {\n\tu8 a;\n\t/* why; and b */\n\tu32 b, c[3];\n\tu8 d;\n};";
        assert_eq!(c_struct(header, "it"), [("a", 0), ("b", 4), ("c", 8), ("d", 20), ("", 24)]);
    }
}
