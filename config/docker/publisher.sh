#!/bin/bash
# Run once by the image of PostgreSQL, in its new server: the table, the publication and the role of parapply.
set -euo pipefail
psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" <<-'SQL'
	CREATE TABLE note (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text);
	CREATE PUBLICATION app FOR ALL TABLES;
SQL
psql -U "$POSTGRES_USER" -v role=parapply_source -f /roles/publisher.sql
psql -v ON_ERROR_STOP=1 -U "$POSTGRES_USER" -v password="$(cat /run/secrets/source_password)" \
	<<<"ALTER ROLE parapply_source PASSWORD :'password'"
