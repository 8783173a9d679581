-- One transaction a run: a row with a random key.
INSERT INTO events VALUES (gen_random_uuid(), clock_timestamp(), 'Event of client ' || :client_id);
