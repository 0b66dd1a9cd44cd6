// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
)

// Limits of standard input. The largest valid input is GC's on a full node: 4,095 attachments of about 150 bytes each.
const (
	MaxStdin         = 4 << 20
	maxDepth         = 32
	maxAttachments   = 16384
	maxRuntimeLabels = 1024
	maxPortMappings  = 256
)

// Defaults of the configuration.
const (
	DefaultRunDir  = "/run/sluice"
	DefaultLogFile = "/var/log/sluice/cni.log"
	DefaultTimeout = 30 * time.Second
)

const (
	keyValidAttachments = "cni.dev/valid-attachments"
	keyLabelsFromArgs   = "labelsFromArgs"
	capPortMappings     = "portMappings"
	capPodAnnotations   = "io.kubernetes.cri.pod-annotations"
)

// Config is the plugin's part of a CNI network configuration.
type Config struct {
	CNIVersion string
	Name       string // of the network
	RunDir     string // directory of the services' sockets
	StateDir   string // directory with the spool of DEL
	MTU        uint32 // bytes; 0 for the node's default
	LogFile    string // empty for no log
	Timeout    time.Duration
	DNS        cni.DNS
	// Ignored describes the errors in fields that DEL and GC do not need.
	Ignored []string

	// PrevResult is the result of the chain's earlier plugins or, at CHECK, of this plugin; nil if absent.
	PrevResult *cni.Result
	// ValidAttachments is nil if the key is missing, which differs from empty.
	ValidAttachments []workload.Owner
	// Addresses are the addresses that the runtime requests, at most one per family, IPv4 first.
	Addresses []netip.Addr
	// MAC is the address that the runtime requests, with ":" between its bytes; empty for any.
	MAC string
	// PortMappings are the ports of the node that lead to the container.
	PortMappings []PortMapping

	runtimeLabels []keyValue
	argsLabels    []keyValue
	podLabels     string            // the annotation sluice.io/labels
	argumentOf    map[string]string // by label key, the key of CNI_ARGS that has its value
}

type keyValue struct {
	Key   string `json:"key"`
	Value string `json:"value"`
}

// parseConfig parses the document. A key that neither the plugin nor CNI defines is refused, because a misspelt key
// would otherwise silently mean the default.
func parseConfig(command Command, stdin []byte) (Config, error) {
	top, err := object(stdin)
	if err != nil {
		return Config{}, cni.NewError(cni.ErrDecodingFailure, "network configuration: "+err.Error(), "")
	}
	c := Config{RunDir: DefaultRunDir, LogFile: DefaultLogFile, Timeout: DefaultTimeout}
	d := fields{top}

	if err := d.get("cniVersion", &c.CNIVersion); err != nil {
		return Config{}, fieldError("", err)
	}
	steps := []func(fields) error{
		c.parseName, c.parseDirs, c.parseMTU, c.parseLogFile, c.parseTimeout, c.parseLabelsFromArgs, c.parseCNI,
	}
	switch command {
	case Add:
		steps = append(steps, c.parseRuntime, c.parseArgs, c.parsePrevResult)
	case Check:
		steps = append(steps, c.parsePrevResult)
	case GC:
		steps = []func(fields) error{c.parseName, c.parseDirs, c.parseAttachments, c.optional(c.parseLogFile), c.optional(c.parseTimeout)}
	case Del:
		// DEL gets the same configuration that ADD has refused, and must still be able to remove the container.
		steps = []func(fields) error{c.parseDirs, c.optional(c.parseLogFile), c.optional(c.parseTimeout)}
	}
	for _, step := range steps {
		if err := step(d); err != nil {
			return Config{}, err
		}
	}
	if command == Del || command == GC {
		_ = d.get("name", &c.Name) // for the log
		return c, nil
	}
	for _, key := range slices.Sorted(maps.Keys(top)) {
		if !slices.Contains(knownKeys, key) && !strings.HasPrefix(key, "cni.dev/") {
			return Config{}, unsupported(clip(key), top[key], "the key is not known")
		}
	}
	return c, nil
}

// Keys of the plugin first, then the keys that CNI defines for a plugin or for a configuration list.
var knownKeys = []string{
	"runDir", "stateDir", "mtu", "logFile", "timeout", keyLabelsFromArgs,
	"cniVersion", "cniVersions", "name", "type", "capabilities", "runtimeConfig", "args", "dns", "ipam", "ipMasq", "prevResult",
	"disableCheck", "disableGC", "loadOnlyInlinedPlugins",
}

// optional makes a step record its error instead of failing, for a verb that does not need the field.
func (c *Config) optional(step func(fields) error) func(fields) error {
	return func(d fields) error {
		if err := step(d); err != nil {
			c.Ignored = append(c.Ignored, err.Error())
		}
		return nil
	}
}

func (c *Config) parseName(d fields) error {
	if err := d.get("name", &c.Name); err != nil {
		return fieldError("", err)
	}
	if c.Name == "" {
		return Field("name", "is not set")
	}
	if len(c.Name) > 253 || !isName(c.Name) {
		return Field("name", "%q is not the name of a network", clip(c.Name))
	}
	return nil
}

func (c *Config) parseDirs(d fields) error {
	if err := errors.Join(d.get("runDir", &c.RunDir), d.get("stateDir", &c.StateDir)); err != nil {
		return fieldError("", err)
	}
	if err := checkDir(c.RunDir); err != "" {
		return Field("runDir", "%s", err)
	}
	if c.StateDir == "" {
		var ok bool
		if c.StateDir, ok = stateDirOf(c.RunDir); !ok {
			return Field("stateDir", "must be set, because runDir %q does not end in /run/NAME", clip(c.RunDir))
		}
	}
	if err := checkDir(c.StateDir); err != "" {
		return Field("stateDir", "%s", err)
	}
	return nil
}

func (c *Config) parseMTU(d fields) error {
	if err := d.get("mtu", &c.MTU); err != nil {
		return fieldError("", err)
	}
	if c.MTU != 0 && (c.MTU < 1280 || c.MTU > 65535) {
		return Field("mtu", "%d is neither 0 nor in 1280 to 65535", c.MTU)
	}
	return nil
}

// parseLogFile accepts only a path below a log directory: the plugin runs as root, and a mistake must not make it write
// to other files.
func (c *Config) parseLogFile(d fields) error {
	path := c.LogFile
	c.LogFile = "" // the verb runs without a log
	if err := d.get("logFile", &path); err != nil {
		return fieldError("", err)
	}
	if path == "" {
		return nil
	}
	if err := checkDir(path); err != "" {
		return Field("logFile", "%s", err)
	}
	if !isBelow(path, c.RunDir) && !isBelow(path, c.StateDir) && !isLog(path) {
		return Field("logFile", "%q is not below /var/log/sluice, /var/log/sluice-NAME, runDir or stateDir", clip(path))
	}
	c.LogFile = path
	return nil
}

// isLog reports whether a path is below an instance's log directory.
func isLog(path string) bool {
	rest, ok := strings.CutPrefix(path, "/var/log/")
	name, _, below := strings.Cut(rest, "/")
	return ok && below && isInstance(name)
}

// isBelow reports whether a path is below dir, and the name of dir is valid for an instance's directory: any other
// directory could be a mistake.
func isBelow(path, dir string) bool {
	return isInstance(filepath.Base(dir)) && strings.HasPrefix(path, dir+"/")
}

// isInstance reports whether a name is valid for an instance's directory.
func isInstance(name string) bool { return name == "sluice" || strings.HasPrefix(name, "sluice-") }

func (c *Config) parseTimeout(d fields) error {
	var timeout string
	if err := d.get("timeout", &timeout); err != nil {
		return fieldError("", err)
	}
	if timeout == "" {
		return nil
	}
	t, err := time.ParseDuration(timeout)
	if err != nil {
		return Field("timeout", "%q is not a duration like \"30s\"", clip(timeout))
	}
	if t < time.Second || t > 10*time.Minute {
		return Field("timeout", "%s is not in 1s to 10m", t)
	}
	c.Timeout = t
	return nil
}

// parseLabelsFromArgs parses the list of labels whose values are in CNI_ARGS.
func (c *Config) parseLabelsFromArgs(d fields) error {
	if err := d.get(keyLabelsFromArgs, &c.argumentOf); err != nil {
		return fieldError("", err)
	}
	if len(c.argumentOf) > maxRuntimeLabels {
		return Field(keyLabelsFromArgs, "%d labels; at most %d are allowed", len(c.argumentOf), maxRuntimeLabels)
	}
	for _, key := range slices.Sorted(maps.Keys(c.argumentOf)) {
		if why := checkLabel(keyValue{Key: key}); why != "" {
			return Field(keyLabelsFromArgs, "%s", why)
		}
		if c.argumentOf[key] == "" {
			return Field(keyLabelsFromArgs, "label %q names no key of CNI_ARGS", clip(key))
		}
	}
	return nil
}

func (c *Config) parseCNI(d fields) error {
	var (
		capabilities map[string]bool
		ipam         map[string]json.RawMessage
		masquerade   bool
	)
	if err := errors.Join(d.get("capabilities", &capabilities), d.get("ipam", &ipam), d.get("ipMasq", &masquerade), d.get("dns", &c.DNS)); err != nil {
		return fieldError("", err)
	}
	for name, wanted := range capabilities {
		switch name {
		case "labels", "ips", "mac", capPortMappings, capPodAnnotations:
		default:
			if wanted {
				return unsupported("capabilities."+clip(name), []byte("true"), "the capability is not offered")
			}
		}
	}
	if len(ipam) > 0 {
		return unsupported("ipam", d.m["ipam"], "addresses come from sluice-ipam; remove the key")
	}
	if masquerade {
		return unsupported("ipMasq", d.m["ipMasq"], "remove the key")
	}
	for i, s := range c.DNS.Nameservers {
		if _, err := netip.ParseAddr(s); err != nil {
			return Field("dns", "nameservers[%d]: %q is not an address", i, clip(s))
		}
	}
	return nil
}

func (c *Config) parseRuntime(d fields) error {
	var rc map[string]json.RawMessage
	if err := d.get("runtimeConfig", &rc); err != nil {
		return fieldError("", err)
	}
	r := fields{rc}
	var (
		ips         []string
		mac         string
		mappings    []portMapping
		annotations map[string]string
	)
	if err := errors.Join(
		r.get("labels", &c.runtimeLabels), r.get("ips", &ips), r.get("mac", &mac), r.get(capPortMappings, &mappings),
		r.get(capPodAnnotations, &annotations),
	); err != nil {
		return fieldError("runtimeConfig.", err)
	}
	for key, value := range rc {
		switch key {
		case "labels", "ips", "mac", capPortMappings, capPodAnnotations:
		default:
			// Runtimes send only values for capabilities that the configuration announces. If any other
			// value were ignored, the runtime would expect a limit, for example of bandwidth, that is not
			// enforced.
			if string(value) != "null" {
				return unsupported("runtimeConfig."+clip(key), value, "the capability is not offered")
			}
		}
	}
	if err := c.wantAddresses("runtimeConfig.ips", ips); err != nil {
		return err
	}
	if mac != "" {
		bytes, canonical, ok := cni.ParseMAC(mac)
		switch {
		case !ok:
			return Field("runtimeConfig.mac", "%q is not a MAC address", clip(mac))
		case bytes[0]&1 != 0 || bytes == [6]byte{}:
			return Field("runtimeConfig.mac", "%s is not the address of one device", canonical)
		}
		c.MAC = canonical
	}
	c.podLabels = annotations[AnnotationLabels]
	return c.wantPorts(mappings)
}

func (c *Config) parseArgs(d fields) error {
	var args map[string]json.RawMessage
	if err := d.get("args", &args); err != nil {
		return fieldError("", err)
	}
	var own map[string]json.RawMessage
	if err := (fields{args}).get("cni", &own); err != nil {
		return fieldError("args.", err)
	}
	var ips []string
	// Ignore all other keys of args, which belong to other plugins, as CNI requires.
	if err := errors.Join(fields{own}.get("labels", &c.argsLabels), fields{own}.get("ips", &ips)); err != nil {
		return fieldError("args.cni.", err)
	}
	if len(c.argsLabels)+len(c.runtimeLabels) > maxRuntimeLabels {
		return Field("labels", "%d labels; at most %d are allowed", len(c.argsLabels)+len(c.runtimeLabels), maxRuntimeLabels)
	}
	if len(ips) > 0 && len(c.Addresses) > 0 {
		return Field("args.cni.ips", "runtimeConfig.ips requests addresses, too")
	}
	return c.wantAddresses("args.cni.ips", ips)
}

func (c *Config) wantAddresses(field string, ips []string) error {
	for i, s := range ips {
		text, _, _ := strings.Cut(s, "/") // the prefix length comes from the pool
		a, err := netip.ParseAddr(text)
		if err == nil && strings.Contains(s, "/") {
			_, err = netip.ParsePrefix(s)
		}
		if err != nil || a.Zone() != "" || a.Is4In6() || a.IsUnspecified() || a.IsMulticast() {
			return Field(field, "[%d]: %q is not the address of a device", i, clip(s))
		}
		for _, other := range c.Addresses {
			if other.Is4() == a.Is4() {
				return Field(field, "[%d]: %s is the second address of its family", i, a)
			}
		}
		c.Addresses = append(c.Addresses, a)
	}
	slices.SortFunc(c.Addresses, netip.Addr.Compare)
	return nil
}

func (c *Config) parsePrevResult(d fields) error {
	raw, ok := d.m["prevResult"]
	if !ok || string(raw) == "null" {
		return nil
	}
	if !slices.Contains(Versions, c.CNIVersion) {
		return nil // the caller refuses the version with its own code
	}
	// Some runtimes omit the version of the result, because the configuration contains it.
	r, err := cni.ParseResult(raw, c.CNIVersion)
	if err != nil {
		return Field("prevResult", "%v", err)
	}
	c.PrevResult = r
	return nil
}

func (c *Config) parseAttachments(d fields) error {
	if _, ok := d.m[keyValidAttachments]; !ok {
		return nil
	}
	// libcni writes null for an empty list.
	var list []struct {
		ContainerID string `json:"containerID"`
		IfName      string `json:"ifname"`
	}
	if err := d.get(keyValidAttachments, &list); err != nil {
		return fieldError("", err)
	}
	if len(list) > maxAttachments {
		return Field(keyValidAttachments, "%d attachments; at most %d are allowed", len(list), maxAttachments)
	}
	c.ValidAttachments = make([]workload.Owner, 0, len(list))
	for i, a := range list {
		if err := checkContainerID(a.ContainerID); err != "" {
			return Field(keyValidAttachments, "[%d]: containerID: %s", i, err)
		}
		if err := checkInterfaceName(a.IfName); err != "" {
			return Field(keyValidAttachments, "[%d]: ifname: %s", i, err)
		}
		c.ValidAttachments = append(c.ValidAttachments, workload.Owner{ContainerID: a.ContainerID, Interface: a.IfName})
	}
	return nil
}

// checkDir returns the error in a configured path, or "".
func checkDir(path string) string {
	switch {
	case !filepath.IsAbs(path):
		return fmt.Sprintf("%q is not an absolute path", clip(path))
	case len(path) > maxNetns || strings.IndexByte(path, 0) >= 0:
		return "is not a path"
	case filepath.Clean(path) != path:
		return fmt.Sprintf("%q is not in its shortest form, %q", clip(path), clip(filepath.Clean(path)))
	}
	return ""
}

// stateDirOf returns the state directory that belongs to a run directory. Both paths contain the name of the instance:
// ROOT/run/NAME and ROOT/var/lib/NAME.
func stateDirOf(runDir string) (string, bool) {
	parent, name := filepath.Split(runDir)
	root, ok := strings.CutSuffix(parent, "/run/")
	if !ok || name == "" {
		return "", false
	}
	return filepath.Join("/", root, "var/lib", name), true
}

// fields gives access to the members of a JSON object one by one.
type fields struct{ m map[string]json.RawMessage }

// get stores the member of the key in v, if it exists. Its error begins with the key. Unlike json.Unmarshal on a
// struct, keys match exactly and not in any case.
func (d fields) get(key string, v any) error {
	raw, ok := d.m[key]
	if !ok || string(raw) == "null" {
		return nil
	}
	if err := json.Unmarshal(raw, v); err != nil {
		if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			if wrong.Field != "" {
				key += "." + wrong.Field
			}
			return fmt.Errorf("%s: must be %s, and is %s", clip(key), wanted(wrong.Type), given(wrong.Value))
		}
		return fmt.Errorf("%s: %w", clip(key), err)
	}
	return nil
}

// wanted returns the JSON name of a type.
func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Slice, reflect.Array:
		return "a list"
	case reflect.Map, reflect.Struct:
		return "an object"
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	default:
		return "a number"
	}
}

// given describes a value for messages. The decoder's errors also contain the value of some numbers.
func given(value string) string {
	kind, _, _ := strings.Cut(value, " ")
	switch kind {
	case "array":
		return "a list"
	case "object":
		return "an object"
	case "bool":
		return "true or false"
	case "number", "string":
		return "a " + kind
	default:
		return clip(value)
	}
}

// fieldError returns the CNI error for the first error of fields.get.
func fieldError(prefix string, err error) *cni.Error {
	line, _, _ := strings.Cut(err.Error(), "\n")
	return cni.NewError(cni.ErrInvalidConfig, prefix+line, "")
}

// object parses one JSON object, which nothing may follow. It refuses nesting deeper than maxDepth before a recursive
// decoder reads it, and duplicate keys, because readers could use different values.
func object(b []byte) (map[string]json.RawMessage, error) {
	if len(b) > MaxStdin {
		return nil, fmt.Errorf("more than %d bytes", MaxStdin)
	}
	if len(bytes.TrimSpace(b)) == 0 {
		return nil, errors.New("standard input is empty")
	}
	if !utf8.Valid(b) {
		return nil, errors.New("not UTF-8")
	}
	if err := scan(b); err != nil {
		return nil, err
	}
	var m map[string]json.RawMessage
	if err := json.Unmarshal(b, &m); err != nil {
		if kind := new(json.UnmarshalTypeError); errors.As(err, &kind) {
			return nil, fmt.Errorf("want an object, have: %s", kind.Value)
		}
		return nil, err
	}
	if m == nil {
		return nil, errors.New("null is not an object")
	}
	return m, nil
}

func scan(b []byte) error {
	// level is one open bracket. keys is nil in an array.
	type level struct {
		keys    map[string]bool
		wantKey bool
	}
	var stack []level
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	for {
		t, err := dec.Token()
		if errors.Is(err, io.EOF) {
			if len(stack) > 0 {
				return io.ErrUnexpectedEOF
			}
			return nil
		}
		if err != nil {
			return err
		}
		switch t := t.(type) {
		case json.Delim:
			switch t {
			case '{', '[':
				if len(stack) == maxDepth {
					return fmt.Errorf("nested deeper than %d levels", maxDepth)
				}
				l := level{}
				if t == '{' {
					l = level{keys: map[string]bool{}, wantKey: true}
				}
				stack = append(stack, l)
				continue
			default:
				stack = stack[:len(stack)-1]
			}
		case string:
			if n := len(stack) - 1; n >= 0 && stack[n].wantKey {
				if stack[n].keys[t] {
					return fmt.Errorf("key %q is given twice", clip(t))
				}
				stack[n].keys[t] = true
				stack[n].wantKey = false
				continue
			}
		}
		// A value has ended. In an object, a key follows.
		if n := len(stack) - 1; n >= 0 && stack[n].keys != nil {
			stack[n].wantKey = true
		}
	}
}
