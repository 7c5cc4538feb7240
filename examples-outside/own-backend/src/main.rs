fn main() {
    println!("{}", alloc_core::Addr::new(5));
}
