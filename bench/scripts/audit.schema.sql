-- Articles whose changes of price a trigger notes on the target, in a table that is not published because it is
-- UNLOGGED. psql variable: scale.
CREATE TABLE articles (
    id bigint PRIMARY KEY,
    price bigint NOT NULL
);
CREATE UNLOGGED TABLE price_changes (
    id bigint NOT NULL,
    before bigint NOT NULL,
    after bigint NOT NULL
);
CREATE FUNCTION note_price() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.price_changes VALUES (NEW.id, OLD.price, NEW.price);
    RETURN NULL;
END
$$;
CREATE TRIGGER note_price AFTER UPDATE ON articles FOR EACH ROW EXECUTE FUNCTION note_price();
ALTER TABLE articles ENABLE REPLICA TRIGGER note_price;
INSERT INTO articles SELECT id, 0 FROM generate_series(1, 10000 * :scale) AS id;
VACUUM ANALYZE articles;
