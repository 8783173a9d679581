-- Every statement is a transaction. psql variables: scale, and rows, those of the INSERT. The UPDATE changes half as many
-- old rows, from the front, the DELETE removes a third as many, from the end, if there are so many.
INSERT INTO items SELECT 100000 * :scale + id, 0, 'Item ' || id FROM generate_series(1, :rows) AS id;
UPDATE items SET amount = amount + 1 WHERE id <= least(:rows / 2, 50000 * :scale);
DELETE FROM items WHERE id <= 100000 * :scale AND id > 100000 * :scale - least(:rows / 3, 50000 * :scale);
