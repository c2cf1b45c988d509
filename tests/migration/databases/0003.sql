BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0003');
CREATE TABLE attempts (
	id VARCHAR(64) NOT NULL, 
	trial_id VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	node_id VARCHAR(64) NOT NULL, 
	dir TEXT, 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME, 
	outcome VARCHAR(32), 
	cause TEXT NOT NULL, 
	exit_codes TEXT NOT NULL, 
	error TEXT, 
	exit TEXT, 
	acked BIGINT DEFAULT '0' NOT NULL, 
	directive TEXT NOT NULL, 
	CONSTRAINT pk_attempts PRIMARY KEY (id), 
	CONSTRAINT fk_attempts_node_id_nodes FOREIGN KEY(node_id) REFERENCES nodes (id), 
	CONSTRAINT fk_attempts_trial_id_trials FOREIGN KEY(trial_id) REFERENCES trials (id), 
	CONSTRAINT uq_attempts_trial_id_number UNIQUE (trial_id, number)
);
INSERT INTO "attempts" VALUES('attempt-10','trial-4',1,1,'node-9',NULL,'2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000','completed','"test"','[0]',NULL,'{"exit_codes":[0]}',6,'{"action":"continue","grace_seconds":30.0,"reason":"","version":0}');
INSERT INTO "attempts" VALUES('attempt-11','trial-6',1,1,'node-9',NULL,'2026-01-01 00:00:00.000000',NULL,'2026-01-01 00:00:00.000000','vanished','"test"','[]',NULL,NULL,0,'{"action":"continue","grace_seconds":30.0,"reason":"","version":0}');
INSERT INTO "attempts" VALUES('attempt-12','trial-6',2,1,'node-9',NULL,'2026-01-01 00:00:00.000000',NULL,NULL,NULL,'""','[]',NULL,NULL,0,'{"action":"continue","grace_seconds":30.0,"reason":"","version":0}');
CREATE TABLE checkpoints (
	trial_id VARCHAR(64) NOT NULL, 
	attempt INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	step BIGINT NOT NULL, 
	uri TEXT NOT NULL, 
	bytes BIGINT NOT NULL, 
	committed_at DATETIME NOT NULL, deleted_at DATETIME, 
	CONSTRAINT pk_checkpoints PRIMARY KEY (trial_id, attempt, generation, step), 
	CONSTRAINT fk_checkpoints_trial_id_trials FOREIGN KEY(trial_id) REFERENCES trials (id)
);
INSERT INTO "checkpoints" VALUES('trial-4',1,1,2,'"/c/step-2"',3,'2026-01-01 00:00:00.000000',NULL);
CREATE TABLE counters (
	name VARCHAR(32) NOT NULL, 
	value BIGINT NOT NULL, 
	CONSTRAINT pk_counters PRIMARY KEY (name)
);
INSERT INTO "counters" VALUES('event',15);
INSERT INTO "counters" VALUES('outbox',10);
CREATE TABLE devices (
	id VARCHAR(250) NOT NULL, 
	node_id VARCHAR(64) NOT NULL, 
	"index" INTEGER NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	type VARCHAR(100) NOT NULL, 
	memory_bytes BIGINT NOT NULL, 
	uuid VARCHAR(100) NOT NULL, 
	state VARCHAR(32) NOT NULL, 
	cause TEXT NOT NULL, 
	evidence TEXT NOT NULL, 
	until DATETIME, 
	since DATETIME NOT NULL, 
	CONSTRAINT pk_devices PRIMARY KEY (id), 
	CONSTRAINT fk_devices_node_id_nodes FOREIGN KEY(node_id) REFERENCES nodes (id), 
	CONSTRAINT uq_devices_node_id_index UNIQUE (node_id, "index")
);
INSERT INTO "devices" VALUES('box:0','node-9',0,'fake','fake',1,'u0','healthy','""','{}',NULL,'2026-01-01 00:00:00.000000');
INSERT INTO "devices" VALUES('box:1','node-9',1,'fake','fake',1,'u1','healthy','""','{}',NULL,'2026-01-01 00:00:00.000000');
CREATE TABLE events (
	seq INTEGER NOT NULL, 
	at DATETIME NOT NULL, 
	actor VARCHAR(200) NOT NULL, 
	kind VARCHAR(64) NOT NULL, 
	subject VARCHAR(250) NOT NULL, 
	trial_id VARCHAR(64), 
	attempt_id VARCHAR(64), 
	"before" VARCHAR(32), 
	"after" VARCHAR(32), 
	cause TEXT NOT NULL, 
	data TEXT NOT NULL, 
	CONSTRAINT pk_events PRIMARY KEY (seq)
);
INSERT INTO "events" VALUES(1,'2026-01-01 00:00:00.000000','me','experiment.created','digits',NULL,NULL,NULL,NULL,'""','{}');
INSERT INTO "events" VALUES(2,'2026-01-01 00:00:00.000000','me','sweep.state','sweep-2',NULL,NULL,NULL,'active','""','{"parent":null}');
INSERT INTO "events" VALUES(3,'2026-01-01 00:00:00.000000','me','trial.created','digits-1','trial-4',NULL,NULL,'queued','""','{"params":{"lr":0.1,"text":"[/bold]\u0000é"}}');
INSERT INTO "events" VALUES(4,'2026-01-01 00:00:00.000000','me','trial.created','digits-2','trial-6',NULL,NULL,'queued','""','{"params":{"lr":0.2,"text":"[/bold]\u0000é"}}');
INSERT INTO "events" VALUES(5,'2026-01-01 00:00:00.000000','me','trial.created','digits-3','trial-8',NULL,NULL,'queued','""','{"params":{"lr":0.3,"text":"[/bold]\u0000é"}}');
INSERT INTO "events" VALUES(6,'2026-01-01 00:00:00.000000','node','node.connected','box',NULL,NULL,NULL,NULL,'"first seen"','{"pid":1}');
INSERT INTO "events" VALUES(7,'2026-01-01 00:00:00.000000','node','device.state','box:0',NULL,NULL,NULL,'healthy','"first seen"','{"kind":"fake","memory_bytes":1,"type":"fake","uuid":"u0"}');
INSERT INTO "events" VALUES(8,'2026-01-01 00:00:00.000000','node','device.state','box:1',NULL,NULL,NULL,'healthy','"first seen"','{"kind":"fake","memory_bytes":1,"type":"fake","uuid":"u1"}');
INSERT INTO "events" VALUES(9,'2026-01-01 00:00:00.000000','scheduler','trial.state','digits-1','trial-4','attempt-10','queued','starting','"free"','{"attempt":1,"devices":["box:0"]}');
INSERT INTO "events" VALUES(10,'2026-01-01 00:00:00.000000','node','trial.state','digits-1','trial-4','attempt-10','starting','running','"its ranks are started"','{}');
INSERT INTO "events" VALUES(11,'2026-01-01 00:00:00.000000','server','trial.state','digits-1','trial-4','attempt-10','running','completed','"test"','{"attempt":1,"outcome":"completed"}');
INSERT INTO "events" VALUES(12,'2026-01-01 00:00:00.000000','node','lease.clean','attempt-10','trial-4','attempt-10',NULL,NULL,'""','{"devices":["box:0"]}');
INSERT INTO "events" VALUES(13,'2026-01-01 00:00:00.000000','scheduler','trial.state','digits-2','trial-6','attempt-11','queued','starting','"free"','{"attempt":1,"devices":["box:0"]}');
INSERT INTO "events" VALUES(14,'2026-01-01 00:00:00.000000','server','trial.state','digits-2','trial-6','attempt-11','starting','queued','"test"','{"attempt":1,"outcome":"vanished"}');
INSERT INTO "events" VALUES(15,'2026-01-01 00:00:00.000000','scheduler','trial.state','digits-2','trial-6','attempt-12','queued','starting','"free"','{"attempt":2,"devices":["box:1"]}');
CREATE TABLE experiments (
	id VARCHAR(64) NOT NULL, 
	name VARCHAR(100) NOT NULL, 
	objective TEXT, 
	description TEXT NOT NULL, 
	trials_made INTEGER DEFAULT '0' NOT NULL, 
	mlflow_experiment_id VARCHAR(250), 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_experiments PRIMARY KEY (id), 
	CONSTRAINT uq_experiments_name UNIQUE (name)
);
INSERT INTO "experiments" VALUES('experiment-1','digits','{"evaluator":null,"metric":"accuracy","mode":"max","pattern":null,"reduce":"best","source":"report"}','""',3,NULL,'2026-01-01 00:00:00.000000');
CREATE TABLE generations (
	trial_id VARCHAR(64) NOT NULL, 
	attempt INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	fork_step BIGINT, 
	first_step BIGINT, 
	started_at DATETIME, parent_attempt INTEGER, parent_generation INTEGER, 
	CONSTRAINT pk_generations PRIMARY KEY (trial_id, attempt, generation), 
	CONSTRAINT fk_generations_trial_id_trials FOREIGN KEY(trial_id) REFERENCES trials (id)
);
INSERT INTO "generations" VALUES('trial-4',1,1,NULL,1,'2026-01-01 00:00:00.000000',NULL,NULL);
CREATE TABLE leaders (
	name VARCHAR(32) NOT NULL, 
	holder VARCHAR(200) NOT NULL, 
	counter BIGINT NOT NULL, 
	acquired_at DATETIME NOT NULL, 
	renewed_at DATETIME NOT NULL, 
	CONSTRAINT pk_leaders PRIMARY KEY (name)
);
INSERT INTO "leaders" VALUES('scheduler','one',1,'2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000');
CREATE TABLE lease_devices (
	attempt_id VARCHAR(64) NOT NULL, 
	device_id VARCHAR(250) NOT NULL, 
	clean SMALLINT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_lease_devices PRIMARY KEY (attempt_id, device_id), 
	CONSTRAINT fk_lease_devices_attempt_id_leases FOREIGN KEY(attempt_id) REFERENCES leases (attempt_id), 
	CONSTRAINT fk_lease_devices_device_id_devices FOREIGN KEY(device_id) REFERENCES devices (id)
);
INSERT INTO "lease_devices" VALUES('attempt-10','box:0',1);
INSERT INTO "lease_devices" VALUES('attempt-11','box:0',0);
INSERT INTO "lease_devices" VALUES('attempt-12','box:1',0);
CREATE TABLE leases (
	attempt_id VARCHAR(64) NOT NULL, 
	state VARCHAR(32) NOT NULL, 
	heartbeat BIGINT DEFAULT '0' NOT NULL, 
	created_at DATETIME NOT NULL, 
	released_at DATETIME, 
	clean_at DATETIME, 
	CONSTRAINT pk_leases PRIMARY KEY (attempt_id), 
	CONSTRAINT fk_leases_attempt_id_attempts FOREIGN KEY(attempt_id) REFERENCES attempts (id)
);
INSERT INTO "leases" VALUES('attempt-10','clean',0,'2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000');
INSERT INTO "leases" VALUES('attempt-11','releasing',0,'2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000',NULL);
INSERT INTO "leases" VALUES('attempt-12','active',0,'2026-01-01 00:00:00.000000',NULL,NULL);
CREATE TABLE ledger (
	attempt_id VARCHAR(64) NOT NULL, 
	unit VARCHAR(32) NOT NULL, 
	name VARCHAR(100) NOT NULL, 
	amount FLOAT NOT NULL, 
	CONSTRAINT pk_ledger PRIMARY KEY (attempt_id, unit, name), 
	CONSTRAINT fk_ledger_attempt_id_attempts FOREIGN KEY(attempt_id) REFERENCES attempts (id)
);
INSERT INTO "ledger" VALUES('attempt-10','seconds','productive',1.0);
INSERT INTO "ledger" VALUES('attempt-10','count','batches',2.0);
CREATE TABLE metrics (
	trial_id VARCHAR(64) NOT NULL, 
	"key" VARCHAR(250) NOT NULL, 
	step BIGINT NOT NULL, 
	attempt INTEGER NOT NULL, 
	generation INTEGER NOT NULL, 
	value FLOAT, 
	text VARCHAR(250), 
	time FLOAT NOT NULL, 
	CONSTRAINT pk_metrics PRIMARY KEY (trial_id, "key", step, attempt, generation), 
	CONSTRAINT fk_metrics_trial_id_trials FOREIGN KEY(trial_id) REFERENCES trials (id)
)
 WITHOUT ROWID

;
INSERT INTO "metrics" VALUES('trial-4','accuracy',1,1,1,0.5,NULL,1.0);
INSERT INTO "metrics" VALUES('trial-4','loss',1,1,1,NULL,'nan',1.0);
INSERT INTO "metrics" VALUES('trial-4','loss',2,1,1,0.1,NULL,2.0);
CREATE TABLE nodes (
	id VARCHAR(64) NOT NULL, 
	name VARCHAR(200) NOT NULL, 
	pid INTEGER NOT NULL, 
	boot_id VARCHAR(64) NOT NULL, 
	version VARCHAR(64) NOT NULL, 
	connected BOOLEAN NOT NULL, 
	created_at DATETIME NOT NULL, 
	seen_at DATETIME, 
	CONSTRAINT pk_nodes PRIMARY KEY (id), 
	CONSTRAINT uq_nodes_name UNIQUE (name)
);
INSERT INTO "nodes" VALUES('node-9','box',1,'boot','1',1,'2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000');
CREATE TABLE outbox (
	seq INTEGER NOT NULL, 
	trial_id VARCHAR(64) NOT NULL, 
	kind VARCHAR(32) NOT NULL, 
	data TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_outbox PRIMARY KEY (seq), 
	CONSTRAINT fk_outbox_trial_id_trials FOREIGN KEY(trial_id) REFERENCES trials (id)
);
INSERT INTO "outbox" VALUES(1,'trial-4','run','{}','2026-01-01 00:00:00.000000');
INSERT INTO "outbox" VALUES(2,'trial-6','run','{}','2026-01-01 00:00:00.000000');
INSERT INTO "outbox" VALUES(3,'trial-8','run','{}','2026-01-01 00:00:00.000000');
INSERT INTO "outbox" VALUES(4,'trial-4','status','{"at":1767225600.0,"state":"starting"}','2026-01-01 00:00:00.000000');
INSERT INTO "outbox" VALUES(5,'trial-4','status','{"at":1767225600.0,"state":"running"}','2026-01-01 00:00:00.000000');
INSERT INTO "outbox" VALUES(6,'trial-4','metrics','{"attempt":1,"generation":1,"rows":[["accuracy",1,0.5,1.0],["loss",1,"nan",1.0],["loss",2,0.1,2.0]]}','2026-01-01 00:00:00.000000');
INSERT INTO "outbox" VALUES(7,'trial-4','status','{"at":1767225600.0,"state":"completed"}','2026-01-01 00:00:00.000000');
INSERT INTO "outbox" VALUES(8,'trial-6','status','{"at":1767225600.0,"state":"starting"}','2026-01-01 00:00:00.000000');
INSERT INTO "outbox" VALUES(9,'trial-6','status','{"at":1767225600.0,"state":"queued"}','2026-01-01 00:00:00.000000');
INSERT INTO "outbox" VALUES(10,'trial-6','status','{"at":1767225600.0,"state":"starting"}','2026-01-01 00:00:00.000000');
CREATE TABLE proposals (
	id VARCHAR(64) NOT NULL, 
	experiment_id VARCHAR(64) NOT NULL, 
	sweep_id VARCHAR(64), 
	actor VARCHAR(200) NOT NULL, 
	"key" TEXT, 
	body_hash VARCHAR(64), 
	status VARCHAR(32) NOT NULL, 
	hint TEXT NOT NULL, 
	note TEXT NOT NULL, 
	trial_ids TEXT NOT NULL, 
	created_at DATETIME NOT NULL, 
	CONSTRAINT pk_proposals PRIMARY KEY (id), 
	CONSTRAINT fk_proposals_experiment_id_experiments FOREIGN KEY(experiment_id) REFERENCES experiments (id), 
	CONSTRAINT fk_proposals_sweep_id_sweeps FOREIGN KEY(sweep_id) REFERENCES sweeps (id), 
	CONSTRAINT uq_proposals_actor_key UNIQUE (actor, "key")
);
INSERT INTO "proposals" VALUES('proposal-3','experiment-1','sweep-2','me','"k0.1"','944c86cea9bc7330529d2ed7e5151a90ede48e9319ad4cc24b6b169774a59e53','accepted','""','""','["trial-4"]','2026-01-01 00:00:00.000000');
INSERT INTO "proposals" VALUES('proposal-5','experiment-1','sweep-2','me','"k0.2"','dbe481653303ae176921397f1ca5c42a336a7379aab182cf44462e5c2c0c80ff','accepted','""','""','["trial-6"]','2026-01-01 00:00:00.000000');
INSERT INTO "proposals" VALUES('proposal-7','experiment-1','sweep-2','me','"k0.3"','1cd1530383b13b76ca7f77eab9d6375bf096172788f35b9d9fe4268ccd17a1c3','accepted','""','""','["trial-8"]','2026-01-01 00:00:00.000000');
CREATE TABLE sweeps (
	id VARCHAR(64) NOT NULL, 
	experiment_id VARCHAR(64) NOT NULL, 
	parent_id VARCHAR(64), 
	actor VARCHAR(200) NOT NULL, 
	"key" TEXT, 
	body_hash VARCHAR(64), 
	config TEXT NOT NULL, 
	sweep TEXT NOT NULL, 
	schedule TEXT, 
	state VARCHAR(32) NOT NULL, 
	cause TEXT NOT NULL, 
	proposed INTEGER DEFAULT '0' NOT NULL, 
	created_at DATETIME NOT NULL, 
	ended_at DATETIME, 
	next_run_at DATETIME, 
	CONSTRAINT pk_sweeps PRIMARY KEY (id), 
	CONSTRAINT fk_sweeps_experiment_id_experiments FOREIGN KEY(experiment_id) REFERENCES experiments (id), 
	CONSTRAINT fk_sweeps_parent_id_sweeps FOREIGN KEY(parent_id) REFERENCES sweeps (id), 
	CONSTRAINT uq_sweeps_actor_key UNIQUE (actor, "key")
);
INSERT INTO "sweeps" VALUES('sweep-2','experiment-1',NULL,'me','"sweep"','c0ceab1f5a3dc982da6a303252fd91678831a848a26492b2cbb4358511e53cf0','{"args":"flags","checkpoint_quota_bytes":null,"code":null,"code_links":{},"compute":{"gpus":1,"gpus_per_node":null,"hang_seconds":600.0,"max_time_seconds":null,"memory":null,"nodes":null,"procs":null,"type":[]},"env":{},"experiment":"digits","max_retries":3,"objective":{"evaluator":null,"metric":"accuracy","mode":"max","pattern":null,"reduce":"best","source":"report"},"priority":"normal","python":null,"rank":0,"resume":null,"run":{"argv":[],"kind":"script","target":"train.py"},"seed":null,"workdir":null}','{"fixed":{},"parallel":4,"planner":"tpe","prune":null,"seed":0,"space":{"lr":{"choices":[],"high":1.0,"kind":"log","low":0.0001,"step":null,"when":null}},"stop":{"consecutive_failures":5,"gpu_hours":null,"target":null},"trials":20}',NULL,'active','""',3,'2026-01-01 00:00:00.000000',NULL,NULL);
CREATE TABLE trials (
	id VARCHAR(64) NOT NULL, 
	experiment_id VARCHAR(64) NOT NULL, 
	number INTEGER NOT NULL, 
	name VARCHAR(120) NOT NULL, 
	sweep_id VARCHAR(64), 
	proposal_id VARCHAR(64) NOT NULL, 
	config TEXT NOT NULL, 
	params TEXT NOT NULL, 
	config_hash VARCHAR(64) NOT NULL, 
	replicate INTEGER NOT NULL, 
	state VARCHAR(32) NOT NULL, 
	state_cause TEXT NOT NULL, 
	seq BIGINT NOT NULL, 
	priority SMALLINT NOT NULL, 
	rank INTEGER NOT NULL, 
	place BIGINT NOT NULL, 
	not_before DATETIME, 
	tracked BOOLEAN NOT NULL, 
	value FLOAT, 
	step BIGINT DEFAULT '0' NOT NULL, 
	phase VARCHAR(64), 
	attempts_made INTEGER DEFAULT '0' NOT NULL, 
	retries_used INTEGER DEFAULT '0' NOT NULL, 
	preemptions INTEGER DEFAULT '0' NOT NULL, 
	error TEXT, 
	mlflow_run_id VARCHAR(64), 
	created_at DATETIME NOT NULL, 
	started_at DATETIME, 
	ended_at DATETIME, 
	CONSTRAINT pk_trials PRIMARY KEY (id), 
	CONSTRAINT fk_trials_experiment_id_experiments FOREIGN KEY(experiment_id) REFERENCES experiments (id), 
	CONSTRAINT fk_trials_proposal_id_proposals FOREIGN KEY(proposal_id) REFERENCES proposals (id), 
	CONSTRAINT fk_trials_sweep_id_sweeps FOREIGN KEY(sweep_id) REFERENCES sweeps (id), 
	CONSTRAINT uq_trials_experiment_id_number UNIQUE (experiment_id, number), 
	CONSTRAINT uq_trials_name UNIQUE (name), 
	CONSTRAINT uq_trials_seq UNIQUE (seq)
);
INSERT INTO "trials" VALUES('trial-4','experiment-1',1,'digits-1','sweep-2','proposal-3','{"args":"flags","checkpoint_quota_bytes":null,"code":null,"code_links":{},"compute":{"gpus":1,"gpus_per_node":null,"hang_seconds":600.0,"max_time_seconds":null,"memory":null,"nodes":null,"procs":null,"type":[]},"env":{},"experiment":"digits","max_retries":3,"objective":{"evaluator":null,"metric":"accuracy","mode":"max","pattern":null,"reduce":"best","source":"report"},"priority":"normal","python":null,"rank":0,"resume":null,"run":{"argv":[],"kind":"script","target":"train.py"},"seed":null,"workdir":null}','{"lr":0.1,"text":"[/bold]\u0000é"}','28fcc6a7de5f97bd350d4b36df7715e3',0,'completed','"test"',3,1,0,3,NULL,1,0.5,0,NULL,1,0,0,NULL,NULL,'2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000');
INSERT INTO "trials" VALUES('trial-6','experiment-1',2,'digits-2','sweep-2','proposal-5','{"args":"flags","checkpoint_quota_bytes":null,"code":null,"code_links":{},"compute":{"gpus":1,"gpus_per_node":null,"hang_seconds":600.0,"max_time_seconds":null,"memory":null,"nodes":null,"procs":null,"type":[]},"env":{},"experiment":"digits","max_retries":3,"objective":{"evaluator":null,"metric":"accuracy","mode":"max","pattern":null,"reduce":"best","source":"report"},"priority":"normal","python":null,"rank":0,"resume":null,"run":{"argv":[],"kind":"script","target":"train.py"},"seed":null,"workdir":null}','{"lr":0.2,"text":"[/bold]\u0000é"}','fd0266d99f543fbfe98fde1051a2338e',0,'starting','"free"',4,1,0,4,NULL,0,NULL,0,NULL,2,1,0,NULL,NULL,'2026-01-01 00:00:00.000000','2026-01-01 00:00:00.000000',NULL);
INSERT INTO "trials" VALUES('trial-8','experiment-1',3,'digits-3','sweep-2','proposal-7','{"args":"flags","checkpoint_quota_bytes":null,"code":null,"code_links":{},"compute":{"gpus":1,"gpus_per_node":null,"hang_seconds":600.0,"max_time_seconds":null,"memory":null,"nodes":null,"procs":null,"type":[]},"env":{},"experiment":"digits","max_retries":3,"objective":{"evaluator":null,"metric":"accuracy","mode":"max","pattern":null,"reduce":"best","source":"report"},"priority":"normal","python":null,"rank":0,"resume":null,"run":{"argv":[],"kind":"script","target":"train.py"},"seed":null,"workdir":null}','{"lr":0.3,"text":"[/bold]\u0000é"}','a61399bb3cb8b658579a768fd08a817b',0,'queued','""',5,1,0,5,NULL,0,NULL,0,NULL,0,0,0,NULL,NULL,'2026-01-01 00:00:00.000000',NULL,NULL);
CREATE INDEX ix_events_trial_id_seq ON events (trial_id, seq);
CREATE INDEX ix_sweeps_experiment_id ON sweeps (experiment_id);
CREATE INDEX ix_sweeps_parent_id ON sweeps (parent_id);
CREATE INDEX ix_sweeps_state ON sweeps (state);
CREATE INDEX ix_proposals_experiment_id ON proposals (experiment_id);
CREATE INDEX ix_proposals_sweep_id ON proposals (sweep_id);
CREATE INDEX ix_trials_experiment_id_config_hash ON trials (experiment_id, config_hash);
CREATE INDEX ix_trials_proposal_id ON trials (proposal_id);
CREATE INDEX ix_trials_state_priority_rank_place ON trials (state, priority, rank, place);
CREATE INDEX ix_trials_sweep_id ON trials (sweep_id);
CREATE INDEX ix_attempts_live ON attempts (node_id) WHERE ended_at IS NULL;
CREATE INDEX ix_leases_unclean ON leases (state) WHERE state <> 'clean';
CREATE UNIQUE INDEX uq_lease_devices_live ON lease_devices (device_id) WHERE clean = 0;
COMMIT;
