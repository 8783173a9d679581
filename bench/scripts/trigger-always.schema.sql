-- Articles with a trigger that also runs on the target. psql variable: scale.
CREATE TABLE articles (
    id bigint PRIMARY KEY,
    price bigint NOT NULL,
    total bigint NOT NULL
);
CREATE FUNCTION set_total() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.total := 2 * NEW.price;
    RETURN NEW;
END
$$;
CREATE TRIGGER set_total BEFORE INSERT OR UPDATE ON articles FOR EACH ROW EXECUTE FUNCTION set_total();
ALTER TABLE articles ENABLE ALWAYS TRIGGER set_total;
INSERT INTO articles SELECT id, 0, 0 FROM generate_series(1, 10000 * :scale) AS id;
VACUUM ANALYZE articles;
