// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package config fills a struct from defaults, a YAML file, the environment
// and flags, in this order, and reports every error at once.
//
// The struct is the whole declaration:
//
//	type Config struct {
//		Lease time.Duration  `config:"lease" help:"how long an unconfirmed address is kept"`
//		CIDRs []netip.Prefix `config:"cidrs" help:"what addresses are taken from"`
//		Mode  string         `config:"mode" enum:"none,required" help:"…"`
//		Delay time.Duration  `config:"delay" was:"wait" help:"…"` // wait is refused, with the new name
//		Store StoreConfig    `config:"store"`   // a group: store.path
//		Common               `config:",inline"` // its keys without a prefix
//	}
//
// A key such as store.maxSize is the path in the file, the flag --store-max-size and the variable
// SLUICE_<SERVICE>_STORE_MAX_SIZE. Lists are comma-separated in flags and variables. Fields without
// the tag are ignored. Supported types: strings, booleans, numbers, time.Duration, ByteSize,
// implementations of encoding.TextUnmarshaler (netip.Addr, netip.Prefix, netip.AddrPort), lists of
// these, and map[string]string.
//
// Parsing of the file is strict: unknown and duplicate keys are errors that name the line. A file
// that users other than root and the process's own user can write is refused. If the struct, or a
// group in it, has a method Validate() error, Load calls it after all values are set; the method
// collects errors in Problems, or joins errors with a method Key() string. Checks across several
// values, such as two options that contradict each other, belong in Validate.
package config

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/sluice-net/sluice/kit/instance"
)

// MaxFileSize is the largest configuration file that is read, in bytes.
const MaxFileSize = 1 << 20

// ErrHelp and ErrPrinted report that the requested text was written to Options.Output and that the
// process should exit with success.
var (
	ErrHelp    = flag.ErrHelp
	ErrPrinted = errors.New("configuration printed")
)

// Options are the inputs of Load.
type Options struct {
	Service string    // part of the names of the file and of the variables
	Args    []string  // without the program's name
	Environ []string  // as os.Environ returns it
	Output  io.Writer // for --help, --version and --print-config; os.Stdout if nil
	Version string    // what --version prints
	// Root is prepended to every default path, for tests.
	Root string
}

// Source names the place that a value came from: a default, the file, a variable or a flag.
type Source string

// Sources in ascending order of precedence.
const (
	FromDefault Source = "default"
	FromFile    Source = "file"
	FromEnv     Source = "environment"
	FromFlag    Source = "flag"
)

// Entry is one setting of the effective configuration, with its value and source.
type Entry struct {
	Key    string
	Value  string // "(secret)" if the field is marked as secret
	Source Source
}

// Effective is the effective configuration of a process.
type Effective struct {
	Paths   instance.Paths
	File    string // path of the file that was read; empty if none was read
	Entries []Entry
	// Ignored lists variables that have the service's prefix and match no key. They are not errors,
	// because Kubernetes injects variables with such names into containers.
	Ignored  []string
	misspelt []string // the ignored variables that Kubernetes does not inject
}

// Each yields the key, value and source of every setting as text, in order.
func (e *Effective) Each(yield func(key, value, source string)) {
	for _, entry := range e.Entries {
		yield(entry.Key, entry.Value, string(entry.Source))
	}
}

// LogValue makes the whole configuration one log attribute.
func (e *Effective) LogValue() slog.Value {
	attrs := make([]slog.Attr, 0, len(e.Entries)+3)
	attrs = append(attrs, slog.String("instance", e.Paths.Name), slog.String("file", e.File))
	for _, entry := range e.Entries {
		attrs = append(attrs, slog.Group(entry.Key, "value", entry.Value, "source", string(entry.Source)))
	}
	if len(e.Ignored) > 0 {
		attrs = append(attrs, slog.Any("ignored_environment", e.Ignored))
	}
	return slog.GroupValue(attrs...)
}

// Load returns the configuration of a service. defaults receives the directories of the instance,
// because many defaults are paths below them. All problems are returned at once, joined; each is a
// *Problem.
func Load[T any](o Options, defaults func(instance.Paths) T) (T, *Effective, error) {
	var zero T
	if err := instance.CheckService(o.Service); err != nil {
		return zero, nil, err
	}
	if o.Output == nil {
		o.Output = os.Stdout
	}
	env := environment(o)

	// --instance and --config select the file, so they are parsed first.
	name := cmp.Or(instanceIn(o.Args), env["INSTANCE"])
	paths, err := instance.New(name)
	if err != nil {
		return zero, nil, &Problem{Key: "instance", Err: err}
	}
	if o.Root != "" {
		paths = paths.Under(o.Root)
	}
	cfg := defaults(paths)
	fields, err := fieldsOf(&cfg)
	if err != nil {
		return zero, nil, err
	}

	fset := flag.NewFlagSet("sluice-"+o.Service, flag.ContinueOnError)
	fset.SetOutput(io.Discard)
	file := fset.String("config", env["CONFIG"], "")
	fset.String("instance", name, "")
	printConfig := fset.Bool("print-config", false, "")
	version := fset.Bool("version", false, "")
	given := map[string]string{}
	for _, f := range fields {
		define := fset.Func
		if f.isBool() {
			define = fset.BoolFunc
		}
		define(f.flag, f.help, func(text string) error { given[f.flag] = text; return nil })
		if f.was != nil {
			define(f.was.flag, "", func(text string) error { given[f.was.flag] = text; return nil })
		}
	}
	switch err := fset.Parse(o.Args); {
	case errors.Is(err, flag.ErrHelp):
		writeHelp(o.Output, o.Service, paths, fields)
		return zero, nil, ErrHelp
	case err != nil:
		return zero, nil, &Problem{Key: "flags", Err: err}
	case fset.NArg() > 0:
		return zero, nil, &Problem{Key: "flags", Err: fmt.Errorf("%q is not a flag", fset.Arg(0))}
	}
	if *version {
		fmt.Fprintln(o.Output, o.Version)
		return zero, nil, ErrPrinted
	}

	eff := &Effective{Paths: paths}
	var problems []error
	data, path, err := readFile(*file, paths.ConfigFile(o.Service))
	if err != nil {
		problems = append(problems, &Problem{Key: "config", Err: err})
	} else if path != "" {
		eff.File = path
		problems = append(problems, applyYAML(path, data, fields)...)
	}
	ignored, more := overlay(o.Service, fields, env, given)
	eff.Ignored = ignored
	for _, name := range ignored {
		if !ofServices.MatchString(strings.TrimPrefix(name, prefix(o.Service))) {
			eff.misspelt = append(eff.misspelt, name)
		}
	}
	problems = append(problems, more...)
	// Checks across several settings run only if every setting could be read.
	if len(problems) == 0 {
		problems = append(problems, validate(&cfg)...)
	}
	for _, f := range fields {
		eff.Entries = append(eff.Entries, Entry{Key: f.key, Value: f.text(), Source: f.source})
	}
	if *printConfig && len(problems) == 0 {
		writeYAML(o.Output, eff, fields)
		return zero, nil, ErrPrinted
	}
	if err := errors.Join(problems...); err != nil {
		return zero, eff, err
	}
	return cfg, eff, nil
}

// overlay applies the variables, then the flags. ignored lists variables with the service's prefix
// that match no key.
func overlay(
	service string, fields []*field, env map[string]string, given map[string]string,
) (ignored []string, problems []error) {
	used := map[string]bool{"CONFIG": true, "INSTANCE": true}
	for _, f := range fields {
		used[f.env] = true
		if s, ok := env[f.env]; ok {
			problems = append(problems, f.set(s, FromEnv, prefix(service)+f.env)...)
		}
		if f.was == nil {
			continue
		}
		if _, ok := env[f.was.env]; ok {
			used[f.was.env] = true
			problems = append(problems, renamed(prefix(service)+f.was.env, f.was.key, prefix(service)+f.env))
		}
		if _, ok := given[f.was.flag]; ok {
			problems = append(problems, renamed("--"+f.was.flag, f.was.key, "--"+f.flag))
		}
	}
	for _, f := range fields {
		if text, ok := given[f.flag]; ok {
			problems = append(problems, f.set(text, FromFlag, "--"+f.flag)...)
		}
	}
	for name := range env {
		if !used[name] {
			ignored = append(ignored, prefix(service)+name)
		}
	}
	slices.Sort(ignored)
	return ignored, problems
}

// ofServices matches the variables, without the prefix, that Kubernetes injects into containers for
// a Service of the same name.
var ofServices = regexp.MustCompile(
	`^(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`)

// Log writes the effective configuration as one record, and a warning that lists variables that are
// probably misspelt.
func (e *Effective) Log(ctx context.Context, l *slog.Logger) {
	l.InfoContext(ctx, "configuration", "config", e)
	if len(e.misspelt) > 0 {
		l.WarnContext(ctx, "environment variables that match no setting are ignored", "variables", e.misspelt)
	}
}

// Problem is one configuration error and the key that it concerns.
type Problem struct {
	Key   string // "store.path"; empty if no single key is at fault
	Where string // "/etc/….yaml:12", "SLUICE_…" or "--flag"; empty for errors of Validate
	Err   error
}

func (p *Problem) Error() string {
	var b strings.Builder
	if p.Where != "" {
		b.WriteString(p.Where + ": ")
	}
	if p.Key != "" {
		b.WriteString(p.Key + ": ")
	}
	return b.String() + p.Err.Error()
}

func (p *Problem) Unwrap() error { return p.Err }

// Problems collects the errors of a Validate method. The zero value contains none.
type Problems struct{ errs []error }

// Addf adds a problem with a key, which is relative to the struct.
func (p *Problems) Addf(key, format string, args ...any) {
	p.errs = append(p.errs, &Problem{Key: key, Err: fmt.Errorf(format, args...)})
}

// Err returns the joined problems, or nil if none was added.
func (p *Problems) Err() error { return errors.Join(p.errs...) }

// All splits an error of Load into its problems.
func All(err error) []error {
	if err == nil {
		return nil
	}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		var all []error
		for _, e := range joined.Unwrap() {
			all = append(all, All(e)...)
		}
		return all
	}
	return []error{err}
}

// renamed returns the error for a key that was renamed in this version.
func renamed(where, key, now string) error {
	return &Problem{Key: key, Where: where, Err: fmt.Errorf("was renamed to %s", now)}
}

func prefix(service string) string {
	return "SLUICE_" + strings.ToUpper(strings.ReplaceAll(service, "-", "_")) + "_"
}

func environment(o Options) map[string]string {
	env := map[string]string{}
	for _, kv := range o.Environ {
		if rest, ok := strings.CutPrefix(kv, prefix(o.Service)); ok {
			name, value, _ := strings.Cut(rest, "=")
			env[name] = value
		}
	}
	return env
}

// instanceIn finds --instance before the flags are defined. It ignores errors, which the later complete parse reports.
func instanceIn(args []string) (found string) {
	for i, a := range args {
		if a == "--" {
			break
		}
		name, value, has := strings.Cut(strings.TrimLeft(a, "-"), "=")
		if !strings.HasPrefix(a, "-") || name != "instance" {
			continue
		}
		if !has && i+1 < len(args) {
			value = args[i+1]
		}
		found = value
	}
	return found
}

func readFile(explicit, standard string) ([]byte, string, error) {
	path := cmp.Or(explicit, standard)
	f, err := os.Open(path)
	if explicit == "" && errors.Is(err, fs.ErrNotExist) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	defer f.Close()
	if err := trusted(f); err != nil {
		return nil, "", err
	}
	data, err := io.ReadAll(io.LimitReader(f, MaxFileSize+1))
	if err != nil {
		return nil, "", err
	}
	if len(data) > MaxFileSize {
		return nil, "", fmt.Errorf("%s is larger than %d bytes", path, MaxFileSize)
	}
	return bytes.TrimPrefix(data, []byte("\xef\xbb\xbf")), path, nil
}

// trusted refuses a file that users other than root and the process's own user can write: the file
// configures, among other things, who may call the service.
func trusted(f *os.File) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	st, ok := fi.Sys().(*syscall.Stat_t)
	switch mode := fi.Mode().Perm(); {
	case !ok:
		return fmt.Errorf("%s: cannot determine its owner", f.Name())
	case st.Uid != 0 && st.Uid != uint32(os.Geteuid()):
		return fmt.Errorf("%s belongs to uid %d; it must be root's or the service's own", f.Name(), st.Uid)
	case mode&0o002 != 0, mode&0o020 != 0 && st.Gid != 0:
		return fmt.Errorf("%s has mode %#o: other users can write it; run: chmod go-w %s", f.Name(), mode, f.Name())
	}
	return nil
}
