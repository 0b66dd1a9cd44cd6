// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package invocation parses the input of the plugin from the container runtime: the CNI environment and the JSON
// document on standard input.
//
// The input comes from outside and is parsed as root. So it is bounded in size and depth, and checked before the
// plugin acts. Invalid input is refused with its CNI code: 4 for the environment, 6 for invalid JSON, 2 for an
// unsupported field of the configuration, 7 for a wrong field, 1 for an unsupported version. The package opens no
// files and makes no calls.
package invocation

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
)

// Versions are the CNI versions that the plugin supports, oldest first.
var Versions = []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"}

// Current is the newest supported version.
const Current = "1.1.0"

// Command is a CNI verb.
type Command string

// The verbs, each with the CNI version that introduced it.
const (
	Add     Command = "ADD"     // 0.1.0
	Del     Command = "DEL"     // 0.1.0
	Check   Command = "CHECK"   // 0.4.0
	Status  Command = "STATUS"  // 1.1.0
	GC      Command = "GC"      // 1.1.0
	Version Command = "VERSION" // 0.1.0
)

// since contains the oldest element of Versions that has each verb.
var since = map[Command]string{Add: "0.3.1", Del: "0.3.1", Check: "0.4.0", Status: "1.1.0", GC: "1.1.0"}

// Invocation is the validated input of one execution of the plugin.
type Invocation struct {
	Command Command
	Owner   workload.Owner // for ADD, DEL and CHECK
	Netns   string         // for ADD and CHECK an absolute path; for DEL possibly empty
	Config  Config

	// Pod identifies the pod, from CNI_ARGS; zero without Kubernetes.
	Pod workload.PodReference
	// Labels of the workload, sorted, without duplicates.
	Labels []label.Label

	args map[string]string // CNI_ARGS
}

// The environment variables that CNI defines and the plugin reads.
const (
	EnvCommand     = "CNI_COMMAND"
	EnvContainerID = "CNI_CONTAINERID"
	EnvIfName      = "CNI_IFNAME"
	EnvNetns       = "CNI_NETNS"
	EnvArgs        = "CNI_ARGS"
)

const (
	maxNetns = 4095 // PATH_MAX without its terminator
	maxArgs  = 64 << 10
)

// isName reports whether s consists of letters, digits, "_", "." and "-", and begins with a letter or digit. These
// checks are loops, because compiling regular expressions took half a millisecond of the few milliseconds that the
// process runs.
func isName(s string) bool {
	for i := range len(s) {
		if !alphanumeric(s[i]) && (i == 0 || strings.IndexByte("_.-", s[i]) < 0) {
			return false
		}
	}
	return s != ""
}

// isDNSName reports whether s consists of at most most lower-case letters, digits and characters of inner, and begins
// and ends with a letter or digit.
func isDNSName(s, inner string, most int) bool {
	if s == "" || len(s) > most {
		return false
	}
	for i := range len(s) {
		c := s[i]
		edge := i == 0 || i == len(s)-1
		if (!alphanumeric(c) || c >= 'A' && c <= 'Z') && (edge || strings.IndexByte(inner, c) < 0) {
			return false
		}
	}
	return true
}

func alphanumeric(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
}

// ParseCommand parses only the verb. It is called before standard input is read, because VERSION needs no input.
func ParseCommand(getenv func(string) string) (Command, error) {
	c := Command(getenv(EnvCommand))
	switch c {
	case Add, Del, Check, Status, GC, Version:
		return c, nil
	case "":
		return "", environment(EnvCommand, "is not set")
	default:
		return "", environment(EnvCommand, "%q is not one of ADD, DEL, CHECK, STATUS, GC, VERSION", clip(string(c)))
	}
}

// Parse validates the environment and the configuration of a verb other than VERSION. Its error is a *cni.Error.
func Parse(command Command, getenv func(string) string, stdin []byte) (Invocation, error) {
	in := Invocation{Command: command}
	if command == Add || command == Del || command == Check {
		if err := in.parseEnvironment(getenv); err != nil {
			return Invocation{}, err
		}
	}
	config, err := parseConfig(command, stdin)
	if err != nil {
		return Invocation{}, err
	}
	in.Config = config
	if !slices.Contains(Versions, config.CNIVersion) {
		return Invocation{}, cni.NewError(cni.ErrIncompatibleVersion, fmt.Sprintf("cniVersion %q is not supported", clip(config.CNIVersion)), "supported: "+strings.Join(Versions, ", "))
	}
	if slices.Index(Versions, config.CNIVersion) < slices.Index(Versions, since[command]) {
		return Invocation{}, cni.NewError(cni.ErrIncompatibleVersion, fmt.Sprintf("cniVersion %s has no %s", config.CNIVersion, command), "it exists since "+since[command])
	}
	switch command {
	case Add:
		if in.Labels, err = workloadLabels(config, in.args); err != nil {
			return Invocation{}, err
		}
	case Check:
		if config.PrevResult == nil {
			return Invocation{}, Field("prevResult", "CHECK needs the result of ADD")
		}
	case GC:
		if config.ValidAttachments == nil {
			return Invocation{}, Field(keyValidAttachments, "GC needs the list of attachments to keep")
		}
	}
	return in, nil
}

// AnswerVersion returns the CNI version for the answer to a configuration that Parse refused: the version of the
// configuration if the plugin supports it, else Current.
func AnswerVersion(stdin []byte) string {
	top, err := object(stdin)
	if err != nil {
		return Current
	}
	var version string
	if err := (fields{top}).get("cniVersion", &version); err != nil || !slices.Contains(Versions, version) {
		return Current
	}
	return version
}

func (in *Invocation) parseEnvironment(getenv func(string) string) error {
	id := getenv(EnvContainerID)
	if err := checkContainerID(id); err != "" {
		return environment(EnvContainerID, "%s", err)
	}
	name := getenv(EnvIfName)
	if err := checkInterfaceName(name); err != "" {
		return environment(EnvIfName, "%s", err)
	}
	in.Owner = workload.Owner{ContainerID: id, Interface: name}

	in.Netns = getenv(EnvNetns)
	switch {
	case in.Netns == "" && in.Command == Del:
	case in.Netns == "":
		return environment(EnvNetns, "is not set")
	case len(in.Netns) > maxNetns:
		return environment(EnvNetns, "is %d bytes long, at most %d make a path", len(in.Netns), maxNetns)
	case in.Netns[0] != '/':
		return environment(EnvNetns, "%q is not an absolute path", clip(in.Netns))
	case strings.IndexByte(in.Netns, 0) >= 0 || !utf8.ValidString(in.Netns):
		return environment(EnvNetns, "%q is not a path", clip(in.Netns))
	}

	// DEL needs no labels, and must succeed whatever configuration ADD had.
	if in.Command == Del {
		return nil
	}
	args, err := parseArgs(getenv(EnvArgs))
	if err != nil {
		return err
	}
	in.args = args
	in.Pod = workload.PodReference{Namespace: args[argPodNamespace], Name: args[argPodName], UID: args[argPodUID]}
	// Accept names that Kubernetes would not allow: podman, for example, passes the name of the container here.
	for _, v := range []struct{ key, value, what string }{
		{argPodNamespace, in.Pod.Namespace, "a namespace"},
		{argPodName, in.Pod.Name, "the name of a pod"},
		{argPodUID, in.Pod.UID, "the id of a pod"},
	} {
		if v.value != "" && (len(v.value) > 253 || !isName(v.value)) {
			return environment(EnvArgs, "%s: %q is not %s", v.key, clip(v.value), v.what)
		}
	}
	return nil
}

// checkContainerID returns the mistake in id, or "".
func checkContainerID(id string) string {
	switch {
	case id == "":
		return "is not set"
	case len(id) > workload.MaxContainerID:
		return fmt.Sprintf("is %d bytes long, at most %d are allowed", len(id), workload.MaxContainerID)
	case !isName(id):
		return fmt.Sprintf("%q is not an id: want letters, digits, \"_\", \".\" and \"-\", a letter or digit first", clip(id))
	}
	return ""
}

// checkInterfaceName returns the mistake in a device name, or "". In addition to CNI's rules it refuses "%", which the
// kernel would expand as a pattern, and "all" and "default", which are directories of its sysctls.
func checkInterfaceName(name string) string {
	bad := func(r rune) bool {
		return r == '/' || r == ':' || r == '%' || r == utf8.RuneError || unicode.IsSpace(r) || unicode.IsControl(r)
	}
	switch {
	case name == "":
		return "is not set"
	case len(name) > workload.MaxInterface:
		return fmt.Sprintf("%q is %d bytes long, at most %d make a device name", clip(name), len(name), workload.MaxInterface)
	case name == ".", name == "..", name == "all", name == "default":
		return fmt.Sprintf("%q cannot be a device name", name)
	case strings.IndexFunc(name, bad) >= 0:
		return fmt.Sprintf("%q is not a device name", name)
	}
	return ""
}

// environment returns a CNI error about a variable.
func environment(name, format string, args ...any) *cni.Error {
	return cni.NewError(cni.ErrInvalidEnvironment, name+": "+fmt.Sprintf(format, args...), "")
}

// Environment returns the CNI error for a variable whose mistake was found later.
func Environment(name string, err error) *cni.Error { return environment(name, "%v", err) }

// Field returns the CNI error for a field of the configuration.
func Field(name, format string, args ...any) *cni.Error {
	return cni.NewError(cni.ErrInvalidConfig, name+": "+fmt.Sprintf(format, args...), "")
}

// unsupported returns the CNI error for a field that the plugin does not support, or not with that value.
func unsupported(name string, value []byte, why string) *cni.Error {
	return cni.NewError(cni.ErrUnsupportedField, fmt.Sprintf("%s: %s is not supported: %s", name, clip(string(value)), why), "")
}

// clip shortens input, so that hostile input cannot fill logs and answers.
func clip(s string) string {
	const most = 80
	if len(s) <= most {
		return s
	}
	return s[:most] + "…"
}
